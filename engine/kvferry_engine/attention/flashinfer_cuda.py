"""Attention over the paged cache with FlashInfer, for GPUs.

Its kernels read keys and values through strides, as two views of our pages [page][kv head][K/V][token][dim]: each is
[page][kv head][token][dim], dense in the last dimension, which FlashInfer calls HND. Latents are read where they lie.
Written after FlashInfer's documentation and sources (0.7.4); docs/hardware.md says what has met a GPU.
"""

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry_engine.attention import LatentHeads, LatentPlan
from kvferry_engine.attention.latent_cpu import LatentTorchPlan
from kvferry_engine.attention.torch_cpu import TorchPlan
from kvferry_engine.batch import ForwardBatch, Ints
from kvferry_engine.config import ModelConfig
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.shard import Shard

WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = {64, 128, 256}
DTYPES = {torch.bfloat16, torch.float16}
LATENT_DIMS = (512, 64)
"""Elements of a latent and of the turned part of the key that its kernel for them is made for."""


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
    return PagedRows(_starts(counts), batch.page_table[members][held].astype(np.int32), last.astype(np.int32))


def supports(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether its kernels have this model's shape."""
    latent = config.latent
    if latent is not None:
        return dtype in DTYPES and (latent.rank, latent.rope_dim) == LATENT_DIMS
    return dtype in DTYPES and config.head_dim in HEAD_DIMS


class FlashInferAttention:
    """Decode rows together in one call, prefills in another. Raises ImportError where FlashInfer is missing."""

    def __init__(self, config: ModelConfig, shard: Shard, device: str) -> None:
        self.library: Any = importlib.import_module("flashinfer")
        self.heads = shard.query_heads(config).size
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._latent_wrapper: Any = None
        if config.latent is None:
            self._prefill = self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "HND")
            # The other kernels are made for as many query heads as there are KV heads.
            self._decode = self.library.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "HND", use_tensor_cores=True)
        else:
            self._latent_wrapper = self.library.mla.BatchMLAPagedAttentionWrapper(self.workspace)

    def plan(self, batch: ForwardBatch, pool: KVPool) -> "FlashInferPlan":
        """Plan a step: FlashInfer's work lists, and write places."""
        decodes = np.flatnonzero(batch.q_lens == 1)
        prefills = np.flatnonzero(batch.q_lens > 1)
        groups = []
        if len(decodes):
            self._plan_decode(batch, pool, decodes)
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

    def _plan_decode(self, batch: ForwardBatch, pool: KVPool, members: Ints) -> None:
        rows, layout, dtype = paged_rows(batch, members), pool.layout, pool.tensor.dtype
        self._decode.plan(
            torch.from_numpy(rows.starts),
            torch.from_numpy(rows.pages).to(pool.tensor.device),
            torch.from_numpy(rows.last),
            self.heads,
            layout.heads_per_rank,
            layout.head_dim,
            layout.page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def _plan_prefill(self, batch: ForwardBatch, pool: KVPool, members: Ints) -> None:
        rows, layout, dtype = paged_rows(batch, members), pool.layout, pool.tensor.dtype
        self._prefill.plan(
            torch.from_numpy(_starts(batch.q_lens[members])),
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
        cache = (self._pool[layer, :, :, 0], self._pool[layer, :, :, 1])
        if len(self._groups) == 1:
            out: torch.Tensor = self._groups[0][0].run(q.contiguous(), cache)
            return out
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for wrapper, rows in self._groups:
            out[rows] = wrapper.run(q[rows], cache)
        return out


class LatentFlashInferPlan:
    """One step's latent attention, one token of each sequence, over latents as they are kept."""

    def __init__(self, batch: ForwardBatch, pool: KVPool, wrapper: Any, heads: int) -> None:  # noqa: ANN401
        self._writes = LatentTorchPlan(batch, pool, attends=False)
        self._pages = pool.tensor[:, :, 0, 0]  # [layer][page][token][latent and turned part]
        self._wrapper, self._heads = wrapper, heads
        self._batch, self._page_size = batch, pool.layout.page_size
        self._planned = False

    def append(self, layer: int, latents: torch.Tensor) -> None:
        """Write latents [T, R + P] to their places."""
        self._writes.append(layer, latents)

    def run(self, layer: int, q: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """Attend from q [T, H, query dim]; returns [T, H, value dim]."""
        if not self._planned:  # the scale, which is part of the plan, is the heads'
            self._plan(heads.scale)
        rank = LATENT_DIMS[0]
        absorbed, pages = heads.absorb(q), self._pages[layer]
        mixed = self._wrapper.run(
            absorbed[..., :rank].contiguous(), absorbed[..., rank:].contiguous(), pages[..., :rank], pages[..., rank:]
        )
        return heads.values(mixed)

    def _plan(self, scale: float) -> None:
        batch, device, dtype = self._batch, self._pages.device, self._pages.dtype
        rows = paged_rows(batch, np.arange(len(batch)))
        self._wrapper.plan(
            torch.arange(len(batch) + 1, dtype=torch.int32, device=device),
            torch.from_numpy(rows.starts).to(device),
            torch.from_numpy(rows.pages).to(device),
            torch.from_numpy(batch.kv_lens.astype(np.int32)).to(device),
            self._heads,
            *LATENT_DIMS,
            self._page_size,
            causal=True,
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        self._planned = True


def _starts(counts: Ints) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _rows(batch: ForwardBatch, members: Ints) -> Ints:
    """Tokens of `members` among the batch's T."""
    return np.concatenate([np.arange(batch.q_lens[each]) + batch.q_starts[each] for each in members])
