"""Attention over the paged cache in kernels of our own, for bfloat16 on CPUs: keys and values are read where they lie.

Sequences with few new tokens attend token by token, each in the same order of sums whatever is beside it. Those with
many do so in blocks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvferry_engine.batch import ForwardBatch, Ints
from kvferry_engine.kernels import Kernels
from kvferry_engine.kv_pool import KVPool

FEW_TOKENS = 17
"""New tokens of a sequence up to which they attend one by one: a step's last token and the most drafts."""


@dataclass(frozen=True)
class _Rows:
    """Tokens that attend one by one."""

    rows: torch.Tensor
    """Which among the batch's T."""
    tables: torch.Tensor
    """Pages of each one's sequence, int64 [rows, most pages]."""
    lens: torch.Tensor
    """Tokens that each one sees, int64 [rows]."""


@dataclass(frozen=True)
class _Chunk:
    """A sequence whose tokens attend in blocks."""

    rows: slice
    table: torch.Tensor
    start: int
    kv_len: int


class KernelPlan:
    """One step's attention."""

    def __init__(self, batch: ForwardBatch, pool: KVPool, kernels: Kernels) -> None:
        self._kernels, self._pool, self._layer = kernels, pool, kernels.layers(pool.tensor)
        self._slots = torch.from_numpy(batch.slot_pages * batch.page_size + batch.slot_offsets)
        self._opened = torch.from_numpy(batch.opened_pages)
        chunked = batch.q_lens > FEW_TOKENS
        self._few = _plan_rows(batch, np.flatnonzero(~chunked[batch.owners]))
        self._chunks = [_plan_chunk(batch, int(index)) for index in np.flatnonzero(chunked)]
        self._work: torch.Tensor | None = None
        self._held: Any = None  # C has its address alone

    @staticmethod
    def fits(pool: KVPool) -> bool:
        """Whether the kernels take heads of the pool's size."""
        return pool.layout.head_dim % 16 == 0 and pool.layout.head_dim <= 256

    @property
    def by_rows(self) -> bool:
        """Whether all tokens attend one by one."""
        return not self._chunks

    def step(self) -> dict[str, Any]:
        """What a KvStep says of attention; good for as long as the plan lives."""
        at, ints, pool = self._kernels.at, self._kernels.ints, self._pool.tensor
        step = {
            "pool": at(pool),
            "layer_stride": pool.stride(0),
            "page_size": self._pool.layout.page_size,
            "slots": ints(self._slots),
            "opened": ints(self._opened),
            "opened_pages": len(self._opened),
        }
        return step | self._step_of_rows() | self._step_of_chunks()

    def _step_of_rows(self) -> dict[str, Any]:
        if self._few is None:
            return {}
        ints, few = self._kernels.ints, self._few
        step = {"tables": ints(few.tables), "lens": ints(few.lens), "width": few.tables.shape[1]}
        return step | {"alone": ints(few.rows), "alone_count": len(few.rows)}

    def _step_of_chunks(self) -> dict[str, Any]:
        if not self._chunks:
            return {}  # a decode step, which has no time to lose
        chunks = [
            (each.rows.start, each.kv_len - each.start, each.start, self._kernels.ints(each.table))
            for each in self._chunks
        ]
        self._held = self._kernels.new("KvChunk[]", chunks)
        return {"chunks": self._held, "chunk_count": len(chunks)}

    def append_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv heads, D] to their places, in pages cleared of what an earlier owner left."""
        if len(self._opened):
            self._pool.tensor[layer].index_fill_(0, self._opened, 0)
        self._kernels.append(self._layer(layer), k, v, self._slots)

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend from q [T, heads, D] to its sequences' tokens up to its own; the same shape, dense."""
        pages = self._layer(layer, q.shape[1])
        few, chunks = self._few, self._chunks
        if few is not None and not chunks:
            return self._kernels.attend_rows(pages, q, few.tables, few.lens)
        if few is None and len(chunks) == 1:
            return self._attend_chunk(pages, q, chunks[0])
        out = torch.empty(q.shape, dtype=q.dtype)
        if few is not None:
            out[few.rows] = self._kernels.attend_rows(pages, q[few.rows], few.tables, few.lens)
        for chunk in chunks:
            out[chunk.rows] = self._attend_chunk(pages, q[chunk.rows], chunk)
        return out

    def _attend_chunk(self, pages: Any, q: torch.Tensor, chunk: _Chunk) -> torch.Tensor:  # noqa: ANN401 - of cffi
        if self._work is None:
            self._work = self._kernels.chunk_work(pages, max(each.kv_len for each in self._chunks))
        return self._kernels.attend_chunk(pages, q, chunk.table, chunk.start, self._work)


def _plan_rows(batch: ForwardBatch, rows: Ints) -> _Rows | None:
    if not len(rows):
        return None
    among = torch.from_numpy(rows)
    tables = torch.from_numpy(batch.page_table[batch.owners[rows]])
    return _Rows(among, tables, lens=batch.positions[among] + 1)


def _plan_chunk(batch: ForwardBatch, member: int) -> _Chunk:
    q_len, kv_len, first = (int(of[member]) for of in (batch.q_lens, batch.kv_lens, batch.q_starts))
    table = torch.from_numpy(np.ascontiguousarray(batch.page_table[member]))
    return _Chunk(rows=slice(first, first + q_len), table=table, start=kv_len - q_len, kv_len=kv_len)
