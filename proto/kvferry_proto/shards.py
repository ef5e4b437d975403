"""The shard plan: which byte range of a page each source rank sends to each destination rank.

Pure arithmetic over two layouts, computed alike by both sides: the sender posts the pieces, the receiver knows
from them how many page arrivals to expect. docs/architecture.md has the picture.
"""

from typing import NamedTuple

from kvferry_proto.layout import KVLayout


class Piece(NamedTuple):
    """One contiguous byte range that travels for every page of every layer, as one write."""

    source_rank: int
    destination_rank: int
    source_offset: int
    """Bytes from the start of the page on the source rank."""
    destination_offset: int
    """Bytes from the start of the page on the destination rank."""
    length: int
    """Bytes."""


def plan(
    source: KVLayout, destination: KVLayout, *, turn: int = 0, names: tuple[str, str] = ("one side", "the other")
) -> list[Piece]:
    """Return the pieces that together fill every byte of a page on every destination rank exactly once.

    Where several source ranks hold copies of a head, the copies take turns over the destination ranks, and over
    transfers by `turn`, which both sides know; so all ranks and their NICs share the writes. How many pieces there are
    does not depend on it. Raises ValueError, which calls the two sides by `names`, if the layouts
    cannot exchange pages.
    """
    why = source.mismatch(destination, names=names)
    if why is not None:
        msg = f"KV pages cannot travel between these nodes: {why}"
        raise ValueError(msg)
    return [piece for rank in range(destination.ranks) for piece in _pieces_for(rank, source, destination, turn)]


def _pieces_for(rank: int, source: KVLayout, destination: KVLayout, turn: int) -> list[Piece]:
    first = destination.first_head(rank)
    last = first + destination.heads_per_rank
    pieces = []
    head = first
    while head < last:
        holder = _holder(head, rank + turn, source)
        holder_first = source.first_head(holder)
        end = min(last, holder_first + source.heads_per_rank)
        pieces.append(
            Piece(
                source_rank=holder,
                destination_rank=rank,
                source_offset=(head - holder_first) * source.head_bytes,
                destination_offset=(head - first) * source.head_bytes,
                length=(end - head) * source.head_bytes,
            )
        )
        head = end
    return pieces


def _holder(head: int, turn: int, source: KVLayout) -> int:
    """Source rank that sends `head` at its `turn`: the replicas of a head take turns."""
    first_holder = head * source.ranks // source.kv_heads
    return first_holder + turn % source.replicas


def arrivals_per_page(pieces: list[Piece], destination_rank: int) -> int:
    """Page arrivals that `destination_rank` counts for one page of one layer."""
    return sum(piece.destination_rank == destination_rank for piece in pieces)
