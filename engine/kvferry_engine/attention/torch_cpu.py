"""Attention over the paged cache in plain torch, for CPUs, and for GPUs without FlashInfer.

A page of one head is one dense block, K and then V, so the gather of a sequence's keys copies whole blocks and gives
[kv head, token, dim] without a transposition. One plan serves every layer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kvferry_engine.attention import AttentionPlan
from kvferry_engine.attention.decode_groups import decode_groups
from kvferry_engine.attention.kernel_cpu import KernelPlan
from kvferry_engine.attention.latent_cpu import LatentTorchPlan
from kvferry_engine.batch import ForwardBatch, Ints
from kvferry_engine.kernels import kernels_for
from kvferry_engine.kv_pool import KVPool


@dataclass(frozen=True)
class _Group:
    """Sequences that attend in one call, all with the same number of new tokens."""

    rows: torch.Tensor | slice
    """Their tokens among the batch's T."""
    blocks: torch.Tensor
    """Blocks to gather, int64 [K/V, sequence, kv head, page], flattened."""
    sequences: int
    q_len: int
    kv_len: int
    """Longest of the group, in tokens."""
    mask: torch.Tensor | None
    """Added to the scores, [sequences or 1, 1, q_len (1 for decode), kv_len]; None where nothing is hidden."""
    causal: bool
    """The kernel's own triangle: every token sees itself and those before it, and nothing was there before."""


class TorchAttention:
    """Kernels of our own where there are any, or torch's: decode rows of like length in one call."""

    def plan(self, batch: ForwardBatch, pool: KVPool) -> AttentionPlan:
        """Plan a step: gather indices, write places and masks that all layers share."""
        kernels = kernels_for(pool.tensor.dtype, pool.tensor.device)
        if kernels is not None and KernelPlan.fits(pool):
            return KernelPlan(batch, pool, kernels)
        return TorchPlan(batch, pool)

    def plan_latent(self, batch: ForwardBatch, pool: KVPool) -> LatentTorchPlan:
        """Do the same for a pool of latents."""
        return LatentTorchPlan(batch, pool)


class TorchPlan:
    """One step's attention."""

    def __init__(self, batch: ForwardBatch, pool: KVPool, *, attends: bool = True) -> None:
        """`attends`: whether `run` is asked for, and not `append_kv` alone."""
        layout = pool.layout
        self._kv_heads, self._page_size, self._head_dim = layout.heads_per_rank, layout.page_size, layout.head_dim
        self._dtype, self._device = pool.tensor.dtype, pool.tensor.device
        # The same memory at three grains: whole pages, (page, head, K/V) blocks, rows of one token.
        self._pages = pool.tensor.view(layout.layers, pool.pages, -1)
        self._blocks = pool.tensor.view(layout.layers, -1, layout.page_size * layout.head_dim)
        self._rows = pool.tensor.view(layout.layers, -1, layout.head_dim)
        self._k_rows, self._v_rows = self._write_rows(batch)
        self._opened = self._on_device(batch.opened_pages)
        self._groups = self._plan_groups(batch) if attends else []

    def append_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv heads, D] to their places, in pages cleared of what an earlier owner left."""
        if len(self._opened):
            # Masked scores do not shield from a NaN that a former owner left: 0 * NaN is NaN.
            self._pages[layer].index_fill_(0, self._opened, 0)
        rows = self._rows[layer]
        rows.index_copy_(0, self._k_rows, k.reshape(-1, self._head_dim))
        rows.index_copy_(0, self._v_rows, v.reshape(-1, self._head_dim))

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend from q [T, heads, D] to its sequences' tokens up to its own; the same shape, dense."""
        if len(self._groups) == 1:
            return self._attend(layer, q, self._groups[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.rows] = self._attend(layer, q[group.rows], group)
        return out

    def _attend(self, layer: int, q: torch.Tensor, group: _Group) -> torch.Tensor:
        """Attention of one group, q [sequences * q_len, H, D]."""
        gathered = self._blocks[layer].index_select(0, group.blocks)
        k, v = gathered.view(2, group.sequences, self._kv_heads, -1, self._head_dim)[:, :, :, : group.kv_len]
        if group.q_len == 1:
            # The query heads of a KV head stand in for query tokens, so that keys are not copied per query head.
            q = q.reshape(group.sequences, self._kv_heads, -1, self._head_dim)
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            return out.reshape(group.sequences, -1, self._head_dim)
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=group.mask, is_causal=group.causal, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1).contiguous()

    def _write_rows(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a layer that the batch's K and V go to, int64 [T * kv heads] each."""
        blocks = batch.slot_pages[:, None] * self._kv_heads + np.arange(self._kv_heads)
        k_rows = (blocks * 2 * self._page_size + batch.slot_offsets[:, None]).reshape(-1)
        return self._on_device(k_rows), self._on_device(k_rows + self._page_size)

    def _plan_groups(self, batch: ForwardBatch) -> list[_Group]:
        decodes = [self._plan_decode(batch, members) for members in decode_groups(batch)]
        return decodes + [self._plan_prefill(batch, int(index)) for index in np.flatnonzero(batch.q_lens > 1)]

    def _plan_decode(self, batch: ForwardBatch, members: Ints) -> _Group:
        kv_lens = batch.kv_lens[members]
        longest = int(kv_lens.max())
        mask = None
        if kv_lens.min() < longest:
            hidden = self._on_device(np.arange(longest) >= kv_lens[:, None])
            mask = self._mask(hidden)[:, None, None]
        return _Group(
            rows=self._on_device(batch.q_starts[members]),
            blocks=self._gather(batch, members, longest),
            sequences=len(members),
            q_len=1,
            kv_len=longest,
            mask=mask,
            causal=False,
        )

    def _plan_prefill(self, batch: ForwardBatch, member: int) -> _Group:
        q_len, kv_len, first = (int(of[member]) for of in (batch.q_lens, batch.kv_lens, batch.q_starts))
        start = kv_len - q_len
        mask = None
        if start:
            hidden = torch.ones(q_len, kv_len, dtype=torch.bool, device=self._device).triu_(start + 1)
            mask = self._mask(hidden)[None, None]
        return _Group(
            rows=slice(first, first + q_len),
            blocks=self._gather(batch, np.array([member]), kv_len),
            sequences=1,
            q_len=q_len,
            kv_len=kv_len,
            mask=mask,
            causal=not start,
        )

    def _gather(self, batch: ForwardBatch, members: Ints, kv_len: int) -> torch.Tensor:
        pages = batch.page_table[members, : -(-kv_len // self._page_size)]
        heads = pages[:, None, :] * self._kv_heads + np.arange(self._kv_heads)[None, :, None]
        return self._on_device(np.stack((heads * 2, heads * 2 + 1)).reshape(-1))

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """Bias that hides where `hidden` is true; in the queries' dtype, so that no layer converts it again."""
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))

    def _on_device(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
