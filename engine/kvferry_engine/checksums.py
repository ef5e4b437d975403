"""Checksums of KV pages, for --verify-kv: source against destination, per page and layer.

The two sides may be sharded differently, and a head may be on several ranks. What is compared is what was written: both
sides walk the pieces of the shard plan in its order, the sender over the bytes that it read, the receiver over those
that were written to, and a page has one checksum over all its pieces.
"""

from collections.abc import Sequence
from typing import NamedTuple

import xxhash
from kvferry_proto.ints import Int32s
from kvferry_proto.shards import Piece

from kvferry_engine.kv_pool import KVPool

_SIGN = 1 << 31


class Place(NamedTuple):
    """A byte range of every page on one rank."""

    rank: int
    start: int
    stop: int


def sent(pieces: Sequence[Piece]) -> list[Place]:
    """Places on the sender's ranks that the pieces are read from."""
    return [Place(each.source_rank, each.source_offset, each.source_offset + each.length) for each in pieces]


def written(pieces: Sequence[Piece]) -> list[Place]:
    """Places on the receiver's ranks that the pieces are written to."""
    return [
        Place(each.destination_rank, each.destination_offset, each.destination_offset + each.length) for each in pieces
    ]


def page_checksums(pools: Sequence[KVPool], pages: Sequence[int], places: Sequence[Place]) -> Int32s:
    """xxh32 over `places` of each page in each layer, as signed numbers, shape [layer][page] flattened.

    `pools` are those of all ranks. Releases the GIL per place.
    """
    return Int32s(
        _signed(_checksum(pools, layer, page, places)) for layer in range(pools[0].layout.layers) for page in pages
    )


def checksum(data: bytes) -> int:
    """xxh32 of `data`, as a signed number."""
    return _signed(xxhash.xxh32_intdigest(data))


def _signed(value: int) -> int:
    return (value ^ _SIGN) - _SIGN


def _checksum(pools: Sequence[KVPool], layer: int, page: int, places: Sequence[Place]) -> int:
    digest = xxhash.xxh32()
    for rank, start, stop in places:
        digest.update(pools[rank].page(layer, page)[start:stop])
    return digest.intdigest()


def first_difference(mine: Int32s, theirs: Int32s, pages: int, first_page: int = 0) -> str | None:
    """Say where two checksum arrays of `pages` pages of a prompt, from `first_page` on, differ; None if they do not."""
    if len(mine) != len(theirs):
        return f"{len(theirs)} checksums came for {len(mine)} pages over all layers"
    for index, (ours, other) in enumerate(zip(mine, theirs, strict=True)):
        if ours != other:
            return f"page {first_page + index % pages} of the prompt differs in layer {index // pages}"
    return None
