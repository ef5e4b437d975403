"""What the fabric reports: events of slots and transfers, and its counts."""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvferry_fabric.contract import TransferHandle


class EventKind(IntEnum):
    """Kinds of event; the numbers are those of kf.h."""

    ARRIVED = 1
    """A slot has received the pages that it expected."""
    OVERRUN = 2
    """A slot has received more pages than it expected: the two sides disagree."""
    DONE = 3
    """All writes of a transfer are in the receiver's memory."""
    CANCELLED = 4
    """A cancelled transfer has nothing in flight any more: the receiver may reuse its pages."""
    FAILED = 5
    """A transfer met an error; nothing of it is in flight any more."""


class TransferState(IntEnum):
    """What a transfer does; the numbers are those of kf.h, the moves are in transfer.c."""

    WAITING = 0
    """For the next layer."""
    POSTING = 1
    DRAINING = 2
    """Nothing more is posted; writes are in flight, or not yet known to have landed."""
    DONE = 3
    CANCELLED = 4
    FAILED = 5


class TransferStatistics(NamedTuple):
    """What has been posted of a transfer so far. Times are monotonic ns, 0 where there is none."""

    pages: int
    """Summed over layers."""
    bytes: int
    writes: int
    registered_ns: int
    first_post_ns: int
    last_counter_ns: int
    """When the last layer was seen done."""
    last_completion_ns: int


class LayerTimes(NamedTuple):
    """Per-layer times of a transfer, monotonic ns, one entry a layer; 0 where it did not happen."""

    seen: tuple[int, ...]
    """When the fabric saw the layer's counter move."""
    posted: tuple[int, ...]
    """When the layer's first write was posted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event. Times are CLOCK_MONOTONIC ns, the clock of time.monotonic_ns(); 0 where there is none."""

    kind: EventKind
    slot: int
    generation: int
    pages: int
    """Slot events: pages that have arrived. Transfers: pages posted, summed over layers."""
    transfer: "TransferHandle | None" = None
    """The transfer that has ended; None for slot events."""
    bytes: int = 0
    writes: int = 0
    first_arrival_ns: int = 0
    last_arrival_ns: int = 0
    registered_ns: int = 0
    first_post_ns: int = 0
    last_counter_ns: int = 0
    """When the last layer was seen done; what comes after it was not hidden behind compute."""
    last_completion_ns: int = 0
    error: int = 0
    """FAILED: errno."""
    text: str = ""
    """FAILED: what went wrong."""
    peer: str = ""
    """Transfers: address of the receiver's first domain, hex."""
    layers: LayerTimes | None = None
    """Transfers of an engine opened with trace=True."""


class DomainStats(NamedTuple):
    """Counts of one domain (NIC)."""

    out: int
    """1 while its link is down: it is not used, unless there is no other."""
    in_flight_writes: int
    in_flight_bytes: int
    """Posted, and not known to have landed."""
    writes: int
    bytes: int


class EngineStats(NamedTuple):
    """Counts of an engine. The first seven are what it holds now, and are zero when it is idle and all is closed."""

    armed_slots: int
    active_transfers: int
    held_transfers: int
    """Ended transfers whose event has not been polled yet."""
    in_flight_writes: int
    regions: int
    peers: int
    counters: int
    stale_immediates: int
    """Immediates of an unarmed slot or another generation; ignored."""
    writes: int
    pages: int
    bytes: int
    local_bytes: int
    """Of these, to peers on this host, without a domain."""
    arrivals: int
    """Immediates that counted toward an armed slot."""
    errors: int
    sleeps: int
    """Times the thread went to sleep."""
    outages: int = 0
    """Times that a domain, or the way to a peer's domain, was taken out of use; each is tried again later."""
