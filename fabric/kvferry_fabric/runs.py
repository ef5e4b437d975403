"""Runs: pages that lie next to each other at the sender and at the receiver, so that they travel as one write."""

import numpy as np
import numpy.typing as npt

Runs = npt.NDArray[np.int32]
"""int32, shape [n, 3]: source page, destination page, count."""


def runs(source_pages: npt.ArrayLike, destination_pages: npt.ArrayLike) -> Runs:
    """Merge the pairs (source page, destination page) that are neighbours on both sides, keeping their order.

    Both arguments hold page indices, shape [pages]. Returns int32 [n, 3]. Raises ValueError if the lengths differ
    or an index is negative or does not fit 31 bits.
    """
    source, destination = _pages(source_pages), _pages(destination_pages)
    if source.shape != destination.shape:
        msg = f"{source.size} source pages cannot be paired with {destination.size} destination pages"
        raise ValueError(msg)
    if source.size == 0:
        return np.empty((0, 3), np.int32)
    breaks = (np.diff(source) != 1) | (np.diff(destination) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(starts, append=source.size)
    return np.stack((source[starts], destination[starts], counts), axis=1).astype(np.int32)


def _pages(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    pages = np.asarray(values, dtype=np.int64)
    if pages.ndim != 1:
        msg = f"page indices must be one-dimensional, got shape {pages.shape}"
        raise ValueError(msg)
    if pages.size and (pages.min() < 0 or pages.max() >= 1 << 31):
        msg = f"page indices must lie in 0..2^31-1, got {pages.min()}..{pages.max()}"
        raise ValueError(msg)
    return pages
