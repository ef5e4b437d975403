"""Slots: what has arrived for whom, counted as fabric/csrc/slots.c counts it."""

import time
from dataclasses import dataclass

from kvferry_fabric.arming import armed_already, check_slot
from kvferry_fabric.events import Event, EventKind


@dataclass
class _Slot:
    generation: int
    expected: int
    arrived: int = 0
    first_ns: int = 0


class Slots:
    """The armed slots of an engine, and the events that they cause."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._armed: dict[int, _Slot] = {}
        self.stale = 0
        self.counted = 0

    def __len__(self) -> int:
        return len(self._armed)

    def expect(self, slot: int, generation: int, pages: int) -> None:
        """Arm a slot. Raises FabricError if it is armed already, or is no slot."""
        check_slot(slot, generation, pages)
        if slot in self._armed:
            raise armed_already(slot, generation)
        self._armed[slot] = _Slot(generation, pages)
        if pages == 0:
            self._report(slot, EventKind.ARRIVED, 0)

    def disarm(self, slot: int, generation: int) -> bool:
        """Stop counting, and drop the slot's events that nobody has taken. False if it was not armed so."""
        armed = self._armed.get(slot)
        if armed is None or armed.generation != generation:
            return False
        del self._armed[slot]
        self._events[:] = [event for event in self._events if event.transfer or event.slot != slot]
        return True

    def arrived(self, slot: int) -> int:
        """Pages that have come for a slot since it was armed; 0 if it is not."""
        armed = self._armed.get(slot)
        return armed.arrived if armed else 0

    def count(self, slot: int, generation: int, pages: int) -> None:
        """An immediate has come."""
        armed = self._armed.get(slot)
        if armed is None or armed.generation != generation:
            self.stale += 1
            return
        self.counted += 1
        before, armed.arrived = armed.arrived, armed.arrived + pages
        now = time.monotonic_ns()
        armed.first_ns = armed.first_ns or now
        if before < armed.expected == armed.arrived:
            self._report(slot, EventKind.ARRIVED, now)
        if before <= armed.expected < armed.arrived:
            self._report(slot, EventKind.OVERRUN, now)

    def _report(self, slot: int, kind: EventKind, now: int) -> None:
        armed = self._armed[slot]
        self._events.append(
            Event(
                kind=kind, slot=slot, generation=armed.generation, pages=armed.arrived,
                first_arrival_ns=armed.first_ns, last_arrival_ns=now,
            )
        )  # fmt: skip
