"""Latent attention (MLA) over the paged cache in plain torch, for CPUs, and for GPUs without FlashInfer.

There are two ways to the same numbers. Absorbed: each query is taken through its head's half of the up-projection, so
that it scores latents as they are kept; all heads of a token then share one key, which is read once. Expanded: the
latents are made into keys and values of every head first, which are a third as long. The second costs a product per
token of context and pays for itself from some number of new tokens on.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kvferry_engine.attention import LatentHeads
from kvferry_engine.attention.decode_groups import decode_groups
from kvferry_engine.batch import ForwardBatch, Ints
from kvferry_engine.kv_pool import KVPool

EXPANDED_TOKENS = 160
"""New tokens of a sequence from which on expanding is faster; half as many where nothing was there before, since the
kernel then leaves out what its own triangle hides.

Counting operations it is 171 for the sizes of DeepSeek-V3, whatever the context; measured 128 to 170."""


@dataclass(frozen=True)
class _Group:
    """Sequences that attend in one call: some that run one token, or one that runs several."""

    rows: torch.Tensor | slice
    """Their tokens among the batch's T."""
    pages: torch.Tensor
    """Pages to gather, int64 [sequences * most pages]."""
    sequences: int
    kv_len: int
    """Longest of the group, in tokens."""
    mask: torch.Tensor | None
    """Added to the scores, [sequences or 1, new tokens, 1, kv_len]; None where nothing is hidden, and where the
    kernel's own triangle does: every token sees itself and those before it, and nothing was there before."""
    q_len: int
    expanded: bool = False
    """Whether keys and values are made of the latents."""


class LatentTorchPlan:
    """One step's attention."""

    def __init__(self, batch: ForwardBatch, pool: KVPool, *, attends: bool = True) -> None:
        """`attends`: whether `run` is asked for, and not `append` alone."""
        layout = pool.layout
        self._page_size = layout.page_size
        self._dtype, self._device = pool.tensor.dtype, pool.tensor.device
        self._pages = pool.tensor.view(layout.layers, pool.pages, layout.page_size * layout.head_dim)
        self._rows = pool.tensor.view(layout.layers, -1, layout.head_dim)
        self._slots = self._on_device(batch.slot_pages * layout.page_size + batch.slot_offsets)
        self._opened = self._on_device(batch.opened_pages)
        self._groups = self._plan_groups(batch) if attends else []

    def append(self, layer: int, latents: torch.Tensor) -> None:
        """Write latents [T, R + P] to their places, in pages cleared of what an earlier owner left."""
        if len(self._opened):
            # Masked scores do not shield from a NaN that a former owner left: 0 * NaN is NaN.
            self._pages[layer].index_fill_(0, self._opened, 0)
        self._rows[layer].index_copy_(0, self._slots, latents)

    def run(self, layer: int, q: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """Attend from q [T, H, query dim]; returns [T, H, value dim]."""
        if len(self._groups) == 1:
            return self._attend(layer, q, self._groups[0], heads)
        parts = [self._attend(layer, q[group.rows], group, heads) for group in self._groups]
        out = torch.empty((len(q), *parts[0].shape[1:]), dtype=q.dtype, device=q.device)
        for group, part in zip(self._groups, parts, strict=True):
            out[group.rows] = part
        return out

    def _attend(self, layer: int, q: torch.Tensor, group: _Group, heads: LatentHeads) -> torch.Tensor:
        latents = self._pages[layer].index_select(0, group.pages).view(group.sequences, -1, self._rows.shape[-1])
        latents = latents[:, : group.kv_len]
        if group.expanded:
            return _expanded(q, latents[0], group, heads)
        return _absorbed(q, latents, group, heads)

    def _plan_groups(self, batch: ForwardBatch) -> list[_Group]:
        decodes = [self._plan_decode(batch, members) for members in decode_groups(batch)]
        return decodes + [self._plan_prefill(batch, int(index)) for index in np.flatnonzero(batch.q_lens > 1)]

    def _plan_decode(self, batch: ForwardBatch, members: Ints) -> _Group:
        kv_lens = batch.kv_lens[members]
        longest = int(kv_lens.max())
        hidden = self._on_device(np.arange(longest) >= kv_lens[:, None])
        return _Group(
            rows=self._on_device(batch.q_starts[members]),
            pages=self._gather(batch, members, longest),
            sequences=len(members),
            kv_len=longest,
            mask=self._mask(hidden)[:, None, None] if kv_lens.min() < longest else None,
            q_len=1,
        )

    def _plan_prefill(self, batch: ForwardBatch, member: int) -> _Group:
        q_len, kv_len, first = (int(of[member]) for of in (batch.q_lens, batch.kv_lens, batch.q_starts))
        expanded = q_len >= (EXPANDED_TOKENS if q_len < kv_len else EXPANDED_TOKENS // 2)
        mask = None
        if not expanded or q_len < kv_len:
            hidden = torch.ones(q_len, kv_len, dtype=torch.bool, device=self._device).triu_(kv_len - q_len + 1)
            mask = self._mask(hidden)[None, :, None]
        return _Group(
            rows=slice(first, first + q_len),
            pages=self._gather(batch, np.array([member]), kv_len),
            sequences=1,
            kv_len=kv_len,
            mask=mask,
            q_len=q_len,
            expanded=expanded,
        )

    def _gather(self, batch: ForwardBatch, members: Ints, kv_len: int) -> torch.Tensor:
        return self._on_device(batch.page_table[members, : -(-kv_len // self._page_size)].reshape(-1))

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """Bias that hides where `hidden` is true, in the queries' dtype."""
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))

    def _on_device(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _absorbed(q: torch.Tensor, latents: torch.Tensor, group: _Group, heads: LatentHeads) -> torch.Tensor:
    """Attend over latents [sequences, n, R + P] as they are, which stand in for key and value of all heads."""
    q = heads.absorb(q)
    # A token's heads stand in for query tokens, and its tokens for heads: one key for all, and a mask for each token.
    rows = q.reshape(group.sequences, group.q_len, *q.shape[1:])
    shared = latents.unsqueeze(1).expand(-1, group.q_len, -1, -1)
    # The kernel wants values as long as keys; the turned part of the sum is dropped again.
    mixed = functional.scaled_dot_product_attention(rows, shared, shared, attn_mask=group.mask, scale=heads.scale)
    return heads.values(mixed.reshape(q.shape))


def _expanded(q: torch.Tensor, latents: torch.Tensor, group: _Group, heads: LatentHeads) -> torch.Tensor:
    """Attend over the keys and values that every head makes of latents [n, R + P]."""
    k, v = heads.expand(latents)
    # The kernel that never holds all scores wants values as long as keys.
    padded = functional.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        padded.unsqueeze(0),
        attn_mask=None if group.mask is None else group.mask.transpose(1, 2),
        is_causal=group.mask is None,
        scale=heads.scale,
    )
    return out[0, ..., : v.shape[-1]].transpose(0, 1)
