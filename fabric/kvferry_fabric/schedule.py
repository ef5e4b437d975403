"""The description of one chunk's transfer to one destination rank."""

from dataclasses import dataclass, fields

from kvferry_proto.memory import MemoryDescriptor

from kvferry_fabric.contract import CounterHandle, PeerHandle, RegionHandle
from kvferry_fabric.runs import Runs

_YEAR = 366 * 86400


def timeout_ns(deadline: float | None) -> int:
    """A deadline in seconds as nanoseconds; 0: none. Raises ValueError if it is not positive, or above a year."""
    if deadline is None:
        return 0
    if not 0 < deadline <= _YEAR:
        msg = f"a deadline is a positive number of seconds, a year at most, not {deadline}"
        raise ValueError(msg)
    return max(1, int(deadline * 1e9))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedWrite:
    """Pages of every layer that go to one receiver. Sizes are bytes.

    The piece of page p in layer l lies `start + l * layer_stride + p * page_stride + offset` bytes into the region,
    on either side with that side's numbers, and is `length` bytes long.
    """

    layers: int
    region: RegionHandle
    """Local memory that the pages are read from."""
    peer: PeerHandle
    remote: MemoryDescriptor
    slot: int
    generation: int
    source_layer_stride: int
    destination_layer_stride: int
    source_page_stride: int
    destination_page_stride: int
    length: int
    runs: Runs
    """int32 [n, 3]: source page, destination page, count."""
    source_offset: int = 0
    destination_offset: int = 0
    source_start: int = 0
    """Bytes from the start of the region to layer 0, page 0."""
    destination_start: int = 0

    def after(self, counter: CounterHandle | None, first_value: int) -> "ChunkSchedule":
        """The same pages, layer by layer, as a counter moves."""
        pages = {each.name: getattr(self, each.name) for each in fields(PagedWrite)}
        return ChunkSchedule(**pages, counter=counter, first_value=first_value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSchedule(PagedWrite):
    """Pages of a chunk that leave layer by layer, as the counter moves."""

    counter: CounterHandle | None
    """None: every layer may be posted at once."""
    first_value: int
    """Layer l may be posted once the counter is at least first_value + l."""
