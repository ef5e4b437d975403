"""How the other end's memory, and what is to be written there, are described to C."""

from typing import Any

from kvferry_proto.memory import MemoryDescriptor

from kvferry_fabric.handles import LayerCounter, MemoryRegion, Peer, own
from kvferry_fabric.native import NativeEngine
from kvferry_fabric.providers import LOCAL
from kvferry_fabric.runs import Runs
from kvferry_fabric.schedule import ChunkSchedule

_REMOTES_KEPT = 256


def remote_fields(memory: MemoryDescriptor) -> dict[str, Any]:
    """The fields of a kf_remote."""
    if memory.provider == LOCAL:
        return {"length": memory.length, "local_key": memory.domains[0].key}
    keys = [{"base": domain.base, "key": domain.key} for domain in memory.domains]
    local_key = memory.local.key if memory.local else 0
    return {"length": memory.length, "domains": len(keys), "keys": keys, "local_key": local_key}


def schedule_fields(native: NativeEngine, chunk: ChunkSchedule, runs: Runs) -> dict[str, Any]:
    """The fields of a kf_schedule but its time limit. Raises FabricError for a handle that is not of this engine."""
    return {
        "counter": own(native, chunk.counter, LayerCounter) if chunk.counter else native.ffi.NULL,
        "first_value": chunk.first_value,
        "layers": chunk.layers,
        "slot": chunk.slot,
        "generation": chunk.generation,
        "run_count": len(runs),
        "region": own(native, chunk.region, MemoryRegion),
        "peer": own(native, chunk.peer, Peer),
        "remote": remote_fields(chunk.remote),
        "source_start": chunk.source_start,
        "destination_start": chunk.destination_start,
        "source_layer_stride": chunk.source_layer_stride,
        "destination_layer_stride": chunk.destination_layer_stride,
        "source_page_stride": chunk.source_page_stride,
        "destination_page_stride": chunk.destination_page_stride,
        "source_offset": chunk.source_offset,
        "destination_offset": chunk.destination_offset,
        "length": chunk.length,
        "runs": native.ffi.from_buffer("kf_run[]", runs),
    }


class Remotes:
    """The kf_remote of each of the last descriptors.

    Made once for a descriptor: that takes 4 us, a tenth of a small write's way.
    """

    def __init__(self, native: NativeEngine) -> None:
        self._native = native
        self._known: dict[int, tuple[MemoryDescriptor, Any]] = {}  # the descriptor too: its id stays its own

    def of(self, memory: MemoryDescriptor) -> Any:  # noqa: ANN401 - cdata
        """What C takes for it; stays alive as long as the caller keeps it."""
        known = self._known.get(id(memory))
        if known is None:
            if len(self._known) >= _REMOTES_KEPT:
                self._known.clear()
            known = self._known[id(memory)] = (memory, self._native.ffi.new("kf_remote *", remote_fields(memory)))
        return known[1]
