"""Checksums of pages, to compare a transfer's source with its destination."""

import numpy as np
import numpy.typing as npt
import xxhash


def page_checksums(
    buffer: memoryview,
    pages: npt.ArrayLike,
    *,
    layers: int,
    layer_stride: int,
    page_stride: int,
    length: int,
    start: int = 0,
) -> npt.NDArray[np.uint64]:
    """Hash `length` bytes of each page in each layer. Strides and `start` are bytes.

    Returns uint64 [layers, pages], XXH3 of the bytes at start + layer * layer_stride + page * page_stride.
    Raises ValueError if a page leaves the buffer.
    """
    flat = buffer.cast("B")
    indices = np.asarray(pages, dtype=np.int64)
    sums = np.empty((layers, indices.size), np.uint64)
    last = start + (layers - 1) * layer_stride + int(indices.max(initial=0)) * page_stride + length
    if indices.min(initial=0) < 0 or last > flat.nbytes:
        msg = f"pages {indices.min(initial=0)}..{indices.max(initial=0)} leave the buffer of {flat.nbytes} bytes"
        raise ValueError(msg)
    for layer in range(layers):
        base = start + layer * layer_stride
        for column, page in enumerate(indices.tolist()):
            at = base + page * page_stride
            sums[layer, column] = xxhash.xxh3_64_intdigest(flat[at : at + length])
    return sums
