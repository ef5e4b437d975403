"""Where a request's milliseconds went: what each node saw, in nanoseconds of its own monotonic clock.

Monotonic clocks of two machines have nothing to do with each other. A part carries the id of its clock (the boot);
parts with the same clock are compared directly, others are shifted so that the receipt of a message coincides with
its sending, which makes one network hop look free and changes no duration measured inside a node.
"""

import functools
import time
from pathlib import Path

import msgspec


@functools.cache
def clock_id() -> str:
    """Name of this machine's monotonic clock: its boot id, or "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


MOST_CHUNKS = 1024
"""Chunks that a time line tells apart: it travels in messages, and a prompt may take a pass for each token."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass's share of a prompt."""

    started: int
    ended: int
    tokens: int


class PrefillTimeline(msgspec.Struct, kw_only=True):
    """What the prefiller saw. 0: has not happened."""

    clock: str = msgspec.field(default_factory=clock_id)
    received: int = 0
    chunks: list[Chunk] = []
    """In their order; the last of MOST_CHUNKS stands for all from there on."""
    last_layer: int = 0
    """The last layer's counter was seen."""
    last_write: int = 0
    """The last write's completion came in."""
    pages: int = 0
    """Page arrivals caused: pages times layers."""
    cached: int = 0
    """Tokens whose KV it had already."""
    bytes: int = 0
    writes: int = 0

    def add(self, chunk: Chunk) -> None:
        """Note another pass; where MOST_CHUNKS are noted already, as a part of the last."""
        if len(self.chunks) < MOST_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            self.chunks[-1] = Chunk(last.started, chunk.ended, last.tokens + chunk.tokens)

    @property
    def exposed_ns(self) -> int:
        """The part of the transfer that compute did not hide: from the last layer's end to the last write's."""
        return max(0, self.last_write - self.last_layer) if self.last_write else 0


class DecodeTimeline(msgspec.Struct, kw_only=True):
    """What the decoder saw."""

    clock: str = msgspec.field(default_factory=clock_id)
    assigned: int = 0
    reserved: int = 0
    """Pages and slot were reserved (and Prefill sent, where a prefiller takes part)."""
    first_page: int = 0
    last_page: int = 0
    joined: int = 0
    """Became part of the decode batch."""
    first_token: int = 0
    finished: int = 0
    drafted: int = 0
    """Tokens guessed ahead, and computed beside others."""
    accepted: int = 0
    """Those of them that were right."""


class RouterTimeline(msgspec.Struct, kw_only=True):
    """What the router saw."""

    clock: str = msgspec.field(default_factory=clock_id)
    received: int = 0
    placed: int = 0
    accepted: int = 0
    first_token: int = 0
    finished: int = 0
    attempts: int = 1


class Timeline(msgspec.Struct, kw_only=True):
    """A request's whole record."""

    router: RouterTimeline = msgspec.field(default_factory=RouterTimeline)
    decoder: DecodeTimeline = msgspec.field(default_factory=DecodeTimeline)
    prefiller: PrefillTimeline | None = None


def now() -> int:
    """Nanoseconds of this machine's monotonic clock."""
    return time.monotonic_ns()


def summary_ms(timeline: Timeline) -> dict[str, float]:
    """Return the phases of a finished request in ms after the router received it; absent phases are left out.

    queued: until the first prefill chunk (or the batch) began; exposed_transfer is a duration, as are chunks.
    """
    router, decoder, prefiller = timeline.router, timeline.decoder, timeline.prefiller
    marks: dict[str, int] = {"placed": router.placed, "accepted": router.accepted}
    shift = 0 if decoder.clock == router.clock else router.placed - decoder.assigned
    for name in ("first_page", "last_page", "joined"):
        marks[name] = _shifted(getattr(decoder, name), shift)
    if prefiller is not None and prefiller.chunks:
        offset = shift if prefiller.clock == decoder.clock else shift + decoder.reserved - prefiller.received
        marks["prefill_started"] = _shifted(prefiller.chunks[0].started, offset)
        marks["prefill_ended"] = _shifted(prefiller.chunks[-1].ended, offset)
        marks["last_write"] = _shifted(prefiller.last_write, offset)
    marks |= {"first_token": router.first_token, "finished": router.finished}
    out = {f"{name}_ms": _ms(at - router.received) for name, at in marks.items() if at}
    began = marks.get("prefill_started") or marks["joined"]
    if began:
        out["queued_ms"] = _ms(began - router.received)
    if prefiller is not None:
        out["exposed_transfer_ms"] = _ms(prefiller.exposed_ns)
    return out


def _shifted(at: int, shift: int) -> int:
    return at + shift if at else 0


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)
