"""How the other end's memory, and what is to be written there, are described to C."""

from typing import Any, NamedTuple

from kvferry_proto.memory import MemoryDescriptor

from kvferry_fabric.contract import PeerHandle
from kvferry_fabric.errors import FabricError
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


class _Known(NamedTuple):
    memory: MemoryDescriptor
    """Kept so that its id stays its own."""
    addresses: tuple[str, ...]
    described: Any
    """The kf_remote."""


class Remotes:
    """The kf_remote of each of the last descriptors.

    Made, and checked, once for a descriptor: that takes 5 us, a seventh of a small write's way.
    """

    def __init__(self, native: NativeEngine, provider: str) -> None:
        self._native = native
        self._provider = provider
        self._known: dict[int, _Known] = {}

    def of(self, memory: MemoryDescriptor, peer: PeerHandle) -> Any:  # noqa: ANN401 - cdata
        """What C takes for it; stays alive as long as the caller keeps it. Raises as check()."""
        known = self._known.get(id(memory))
        if known is None or known.addresses != peer.addresses:
            known = self._learn(memory, peer)
        return known.described

    def check(self, memory: MemoryDescriptor, peer: PeerHandle) -> None:
        """Raise FabricError if it is not this peer's memory, or of another provider."""
        if (memory.provider, memory.addresses) != (self._provider, peer.addresses):
            msg = (
                f"memory of {memory.provider} endpoints {', '.join(memory.addresses)} cannot be written through "
                f"{self._provider} peer {', '.join(peer.addresses)}"
            )
            raise FabricError(msg)

    def _learn(self, memory: MemoryDescriptor, peer: PeerHandle) -> _Known:
        self.check(memory, peer)
        if len(self._known) >= _REMOTES_KEPT:
            self._known.clear()
        known = _Known(memory, peer.addresses, self._native.ffi.new("kf_remote *", remote_fields(memory)))
        self._known[id(memory)] = known
        return known
