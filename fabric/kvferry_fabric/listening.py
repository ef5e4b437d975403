"""What an engine hears: pages that arrive for its slots, transfers that end."""

import errno
from threading import Lock
from typing import Any

from kvferry_fabric.arming import armed_already, check_slot, is_slot
from kvferry_fabric.events import Event, EventKind
from kvferry_fabric.looping import Looping
from kvferry_fabric.native import NativeEngine
from kvferry_fabric.transfers import Transfer

_BATCH = 64


class Listening(Looping):
    """The slots of an engine, and its events."""

    def __init__(self, native: NativeEngine) -> None:
        self._native = native
        self._lock = Lock()
        self._transfers: dict[int, Transfer] = {}  # that have not ended
        self._events = native.ffi.new("kf_event[]", _BATCH)

    def expect(self, slot: int, generation: int, pages: int) -> None:
        """Arm a slot: ARRIVED is reported when `pages` pages have come. With 0 pages that is at once.

        Stays armed until disarm(), so that an overrun is noticed. Raises FabricError if it is armed already, or if
        there is no such slot or generation.
        """
        check_slot(slot, generation, pages)
        code = self._native.lib.kf_expect(self._native.pointer, slot, generation, pages)
        if code == -errno.EBUSY:
            raise armed_already(slot, generation)
        self._native.check(code, f"slot {slot}, generation {generation} cannot be armed")

    def disarm(self, slot: int, generation: int) -> bool:
        """Stop counting for a slot; its events that have not been polled are dropped. False if it was not armed so."""
        native = self._native
        return is_slot(slot, generation) and native.lib.kf_disarm(native.pointer, slot, generation) == 1

    def arrived(self, slot: int) -> int:
        """Pages that have arrived for a slot since it was armed."""
        native = self._native
        pointer = native.pointer
        return int(native.lib.kf_arrived(pointer, slot)) if is_slot(slot) else 0

    def poll(self) -> list[Event]:
        """Return the events since the last call; does not wait."""
        native = self._native
        with self._lock:
            events: list[Event] = []
            while True:
                count = native.lib.kf_poll_events(native.pointer, self._events, _BATCH)
                events.extend(self._event(self._events[i]) for i in range(count))
                if count < _BATCH:
                    return events

    def _event(self, raw: Any) -> Event:  # noqa: ANN401 - cdata
        if raw.transfer:
            return self._transfers.pop(raw.transfer).finish(raw)
        return Event(
            kind=EventKind(raw.kind),
            slot=raw.slot,
            generation=raw.generation,
            pages=raw.pages,
            first_arrival_ns=raw.first_ns,
            last_arrival_ns=raw.last_ns,
        )

    @property
    def event_fd(self) -> int:
        """A file descriptor that is readable while events wait to be polled."""
        return int(self._native.lib.kf_event_fd(self._native.pointer))
