"""Latent attention with FlashInfer, for steps in which every sequence runs one token."""

from typing import Any

import numpy as np
import torch

from kvferry_engine.attention import LatentHeads
from kvferry_engine.attention.flashinfer_pages import paged_rows
from kvferry_engine.attention.latent_cpu import LatentTorchPlan
from kvferry_engine.batch import ForwardBatch
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.latent_config import LatentConfig

LATENT_DIMS = (512, 64)
"""Elements of a latent and of the turned part of the key that its kernel for them is made for."""


def supports_latents(latent: LatentConfig) -> bool:
    """Whether the kernel has this shape."""
    return (latent.rank, latent.rope_dim) == LATENT_DIMS


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
