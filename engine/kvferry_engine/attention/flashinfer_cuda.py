"""Attention over the paged cache with FlashInfer, for GPUs.

Its kernels read keys and values through strides, as two views of our pages [page][kv head][K/V][token][dim]: each is
[page][kv head][token][dim], dense in the last dimension, which FlashInfer calls HND.
Written after FlashInfer's documentation and sources (0.7.4); docs/hardware.md says what has met a GPU.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvferry_engine.attention import AttentionPlan, LatentPlan
from kvferry_engine.attention.flashinfer_latent import LatentFlashInferPlan, supports_latents
from kvferry_engine.attention.flashinfer_pages import PagedRows, paged_rows, starts, views
from kvferry_engine.attention.latent_cpu import LatentTorchPlan
from kvferry_engine.attention.torch_cpu import TorchPlan
from kvferry_engine.batch import ForwardBatch, Ints
from kvferry_engine.config import ModelConfig
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.shard import Shard

WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = {64, 128, 256}
DTYPES = {torch.bfloat16, torch.float16}


def supports(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether its kernels have this model's shape."""
    latent = config.latent
    if latent is not None:
        return dtype in DTYPES and supports_latents(latent)
    return dtype in DTYPES and config.head_dim in HEAD_DIMS


class FlashInferAttention:
    """Decode rows together in one call, prefills in another. Raises ImportError where FlashInfer is missing."""

    def __init__(self, config: ModelConfig, shard: Shard, device: str) -> None:
        self.library: Any = importlib.import_module("flashinfer")
        self.heads = shard.query_heads(config).size
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._latent_wrapper: Any = None
        self._held: AttentionPlan | None = None
        if config.latent is None:
            self._prefill = self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "HND")
            # The other kernels are made for as many query heads as there are KV heads.
            self._decode = self.library.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "HND", use_tensor_cores=True)
        else:
            self._latent_wrapper = self.library.mla.BatchMLAPagedAttentionWrapper(self.workspace)

    def plan(self, batch: ForwardBatch, pool: KVPool) -> AttentionPlan:
        """Plan a step: FlashInfer's work lists, and write places."""
        if self._held is not None:
            return self._held
        decodes = np.flatnonzero(batch.q_lens == 1)
        prefills = np.flatnonzero(batch.q_lens > 1)
        groups = []
        if len(decodes):
            plan_decode(self._decode, paged_rows(batch, decodes), self.heads, pool)
            groups.append(_Group(self._decode, _rows(batch, decodes)))
        if len(prefills):
            self._plan_prefill(batch, pool, prefills)
            groups.append(_Group(self._prefill, _rows(batch, prefills)))
        return FlashInferPlan(batch, pool, groups)

    def plan_latent(self, batch: ForwardBatch, pool: KVPool) -> LatentPlan:
        """Do the same for a pool of latents: FlashInfer where all sequences run one token, plain torch elsewhere."""
        if (batch.q_lens > 1).any():
            return LatentTorchPlan(batch, pool)
        return LatentFlashInferPlan(batch, pool, self._latent_wrapper, self.heads)

    @contextmanager
    def holding(self, plan: AttentionPlan) -> Iterator[None]:
        """Have `plan` be the plan of whatever batch is run meanwhile."""
        self._held = plan
        try:
            yield
        finally:
            self._held = None

    def fixed(self, pool: KVPool, size: int, most_pages: int) -> "FlashInferDecode":
        """Return a plan for decode steps of `size` sequences with up to `most_pages` pages, which is filled anew."""
        numbers = (size + 1, size * most_pages, size)
        buffers = [torch.zeros(count, dtype=torch.int32, device=pool.tensor.device) for count in numbers]
        wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers[0],
            paged_kv_indices_buffer=buffers[1],
            paged_kv_last_page_len_buffer=buffers[2],
        )
        return FlashInferDecode(pool, size, wrapper, self.heads)

    def _plan_prefill(self, batch: ForwardBatch, pool: KVPool, members: Ints) -> None:
        rows, layout, dtype = paged_rows(batch, members), pool.layout, pool.tensor.dtype
        self._prefill.plan(
            torch.from_numpy(starts(batch.q_lens[members])),
            torch.from_numpy(rows.starts),
            torch.from_numpy(rows.pages).to(pool.tensor.device),
            torch.from_numpy(rows.last),
            self.heads,
            layout.heads_per_rank,
            layout.head_dim,
            layout.page_size,
            causal=True,
            q_data_type=dtype,
            kv_data_type=dtype,
        )


@dataclass(frozen=True)
class _Group:
    """Sequences that attend in one call."""

    wrapper: Any
    rows: Ints
    """Their tokens among the batch's T, in order."""


class FlashInferPlan:
    """One step's attention. Keys and values are written as the plain backend writes them."""

    def __init__(self, batch: ForwardBatch, pool: KVPool, groups: list[_Group]) -> None:
        self._writes = TorchPlan(batch, pool, attends=False)
        self._pool = pool.tensor
        self._groups = [(group.wrapper, torch.from_numpy(group.rows).to(pool.tensor.device)) for group in groups]

    def append_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv heads, D] to their places."""
        self._writes.append_kv(layer, k, v)

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend from q [T, heads, D] to its sequences' tokens up to its own; the same shape, dense."""
        cache = views(self._pool, layer)
        if len(self._groups) == 1:
            out: torch.Tensor = self._groups[0][0].run(q.contiguous(), cache)
            return out
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for wrapper, rows in self._groups:
            out[rows] = wrapper.run(q[rows], cache)
        return out


class FlashInferDecode:
    """Attention of decode steps of one size, whose numbers lie in the same places for every step."""

    def __init__(self, pool: KVPool, size: int, wrapper: Any, heads: int) -> None:  # noqa: ANN401
        layout, device = pool.layout, pool.tensor.device
        self._pool, self._wrapper, self._heads, self._size = pool, wrapper, heads, size
        self._rows = pool.tensor.view(layout.layers, -1, layout.head_dim)
        self._k_rows = torch.zeros(size * layout.heads_per_rank, dtype=torch.int64, device=device)
        self._v_rows = torch.zeros_like(self._k_rows)

    def fill(self, batch: ForwardBatch) -> None:
        """Take the numbers of a batch of up to `size` sequences, the last of which stands for those that lack."""
        pool, layout = self._pool, self._pool.layout
        members = np.minimum(np.arange(self._size), len(batch) - 1)
        plan_decode(self._wrapper, paged_rows(batch, members), self._heads, pool)
        heads = layout.heads_per_rank
        blocks = batch.slot_pages[members][:, None] * heads + np.arange(heads)
        k_rows = (blocks * 2 * layout.page_size + batch.slot_offsets[members][:, None]).reshape(-1)
        self._k_rows.copy_(torch.from_numpy(k_rows))
        self._v_rows.copy_(torch.from_numpy(k_rows + layout.page_size))
        if len(batch.opened_pages):
            opened = torch.from_numpy(batch.opened_pages).to(self._k_rows.device)
            pool.tensor.view(layout.layers, pool.pages, -1).index_fill_(1, opened, 0)

    def append_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv heads, D] to their places."""
        rows = self._rows[layer]
        rows.index_copy_(0, self._k_rows, k.reshape(-1, rows.shape[-1]))
        rows.index_copy_(0, self._v_rows, v.reshape(-1, rows.shape[-1]))

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend from q [T, heads, D] to its sequences' tokens up to its own; the same shape, dense."""
        out: torch.Tensor = self._wrapper.run(q.contiguous(), views(self._pool.tensor, layer))
        return out


def plan_decode(wrapper: Any, rows: PagedRows, heads: int, pool: KVPool) -> None:  # noqa: ANN401
    """Give a decode wrapper its sequences."""
    layout, dtype = pool.layout, pool.tensor.dtype
    wrapper.plan(
        torch.from_numpy(rows.starts),
        torch.from_numpy(rows.pages).to(pool.tensor.device),
        torch.from_numpy(rows.last),
        heads,
        layout.heads_per_rank,
        layout.head_dim,
        layout.page_size,
        q_data_type=dtype,
        kv_data_type=dtype,
    )


def _rows(batch: ForwardBatch, members: Ints) -> Ints:
    """Tokens of `members` among the batch's T."""
    return np.concatenate([np.arange(batch.q_lens[each]) + batch.q_starts[each] for each in members])
