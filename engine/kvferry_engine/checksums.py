"""Checksums of KV pages, for --verify-kv: source against destination, per page and layer."""

from collections.abc import Sequence

import xxhash
from kvferry_proto.ints import Int32s

from kvferry_engine.kv_pool import KVPool

_SIGN = 1 << 31


def page_checksums(pool: KVPool, pages: Sequence[int]) -> Int32s:
    """xxh32 of each page in each layer, as signed numbers, shape [layer][page] flattened. Releases the GIL per page."""
    return Int32s(
        (xxhash.xxh32_intdigest(pool.page(layer, page)) ^ _SIGN) - _SIGN
        for layer in range(pool.layout.layers)
        for page in pages
    )


def first_difference(mine: Int32s, theirs: Int32s, pages: int) -> str | None:
    """Say where two checksum arrays of `pages` pages first differ, or None if they are equal."""
    if len(mine) != len(theirs):
        return f"{len(theirs)} checksums came for {len(mine)} pages over all layers"
    for index, (ours, other) in enumerate(zip(mine, theirs, strict=True)):
        if ours != other:
            return f"page {index % pages} of the prompt differs in layer {index // pages}"
    return None
