"""Pages of a pool, and of sequences, as FlashInfer wants them."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry_engine.batch import ForwardBatch, Ints


class PagedRows(NamedTuple):
    """Pages of some sequences, as FlashInfer wants them: int32 each."""

    starts: NDArray[np.int32]
    """Where each sequence's pages begin among `pages`, and where the last ends, [B + 1]."""
    pages: NDArray[np.int32]
    last: NDArray[np.int32]
    """Tokens in each sequence's last page, [B]; 1 to the page size."""


def paged_rows(batch: ForwardBatch, members: Ints) -> PagedRows:
    """Gather the pages of `members`, indices of sequences of the batch."""
    counts = -(-batch.kv_lens[members] // batch.page_size)
    held = np.arange(batch.page_table.shape[1]) < counts[:, None]
    last = batch.kv_lens[members] - (counts - 1) * batch.page_size
    return PagedRows(starts(counts), batch.page_table[members][held].astype(np.int32), last.astype(np.int32))


def starts(counts: Ints) -> NDArray[np.int32]:
    """Return where each of several runs begins if they lie one behind the other, and where the last ends."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def views(pool: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, [page][kv head][token][dim]."""
    return pool[layer, :, :, 0], pool[layer, :, :, 1]
