"""Transfer slots: numbers that an immediate carries, each with a generation that tells its users apart.

Slots are drawn in the order in which they came back, so a slot rests as long as possible and its generation, 10
bits, wraps only after 1024 uses of that one slot.
"""

from collections import deque
from typing import NamedTuple

from kvferry_proto.immediate import MAX_GENERATIONS, MAX_SLOTS


class Slot(NamedTuple):
    """A slot drawn, and the generation that this use of it has."""

    number: int
    generation: int


class SlotPool:
    """Hands out slots. `draw` and `give_back` are a pair; a slot in quarantine has simply not been given back."""

    def __init__(self, slots: int = MAX_SLOTS) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            msg = f"a node has 1 to {MAX_SLOTS} transfer slots, got {slots}"
            raise ValueError(msg)
        self.slots = slots
        self._rested = deque(range(slots))
        self._generation = [0] * slots
        self._drawn: set[int] = set()

    @property
    def held(self) -> int:
        """Slots drawn and not given back."""
        return len(self._drawn)

    def can_draw(self) -> bool:
        """Whether a slot is at rest."""
        return bool(self._rested)

    def draw(self) -> Slot:
        """Take the slot that has rested longest. Raises IndexError if none rests."""
        number = self._rested.popleft()
        self._generation[number] = (self._generation[number] + 1) % MAX_GENERATIONS
        self._drawn.add(number)
        return Slot(number, self._generation[number])

    def give_back(self, slot: Slot) -> None:
        """Let the slot rest. Raises ValueError if it is not drawn, or drawn by a later user."""
        if slot.number not in self._drawn or self._generation[slot.number] != slot.generation:
            msg = f"slot {slot.number} generation {slot.generation} is not drawn"
            raise ValueError(msg)
        self._drawn.remove(slot.number)
        self._rested.append(slot.number)
