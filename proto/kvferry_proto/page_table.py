"""The page table that a router assigns with: one entry per KV page, its block hash and where it comes from."""

import enum
from typing import NamedTuple

from kvferry_proto.ints import Int32s

ENTRY_INTS = 3


class Source(enum.IntEnum):
    """Where the KV of a page comes from, unless the decoder holds it already, which it alone knows."""

    PREFILLER = 0
    """Sent by the prefiller."""
    LOCAL = 1
    """Computed by the decoder itself."""


class PageEntry(NamedTuple):
    """One page of a prompt."""

    block_hash: int
    """Signed 64-bit; 0 for a last page that is not full, which has no name."""
    source: Source


def pack(entries: list[PageEntry]) -> Int32s:
    """Lay entries out as [hash low, hash high, source] each."""
    table = Int32s()
    for block_hash, source in entries:
        table.extend((_signed(block_hash & 0xFFFFFFFF), block_hash >> 32, source))
    return table


def unpack(table: Int32s) -> list[PageEntry]:
    """Read a page table. Raises ValueError for a torn table or an unknown source."""
    if len(table) % ENTRY_INTS:
        msg = f"a page table has {ENTRY_INTS} numbers per page, got {len(table)}"
        raise ValueError(msg)
    return [
        PageEntry(table[i + 1] << 32 | table[i] & 0xFFFFFFFF, Source(table[i + 2]))
        for i in range(0, len(table), ENTRY_INTS)
    ]


def _signed(low: int) -> int:
    return low - (1 << 32) if low >= 1 << 31 else low
