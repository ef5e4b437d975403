"""The 32-bit immediate of an RDMA write: (slot, generation, pages in this write).

    31        22 21        12 11         0
    [   slot   ][ generation ][   pages   ]

A write of k neighbouring pages counts k, so writes may be merged freely while the number that a receiver expects
stays the page count. The generation tells a slot's present user from an earlier one: a late write of a cancelled
transfer must never count toward the next. EFA carries 4 bytes of CQ data, hence 32 bits on every provider.
"""

from typing import NamedTuple

SLOT_BITS = 10
GENERATION_BITS = 10
PAGES_BITS = 12

MAX_SLOTS = 1 << SLOT_BITS
MAX_GENERATIONS = 1 << GENERATION_BITS
MAX_PAGES_PER_WRITE = (1 << PAGES_BITS) - 1


class Immediate(NamedTuple):
    """A decoded immediate."""

    slot: int
    generation: int
    pages: int


def pack(slot: int, generation: int, pages: int) -> int:
    """Return the 32-bit value. Raises ValueError for a field that does not fit."""
    if not (0 <= slot < MAX_SLOTS and 0 <= generation < MAX_GENERATIONS and 0 <= pages <= MAX_PAGES_PER_WRITE):
        msg = (
            f"immediate out of range: slot {slot} of {MAX_SLOTS}, generation {generation} of {MAX_GENERATIONS}, "
            f"pages {pages} of at most {MAX_PAGES_PER_WRITE}"
        )
        raise ValueError(msg)
    return slot << (GENERATION_BITS + PAGES_BITS) | generation << PAGES_BITS | pages


def unpack(value: int) -> Immediate:
    """Split a 32-bit value into its fields."""
    return Immediate(
        value >> (GENERATION_BITS + PAGES_BITS),
        value >> PAGES_BITS & (MAX_GENERATIONS - 1),
        value & MAX_PAGES_PER_WRITE,
    )
