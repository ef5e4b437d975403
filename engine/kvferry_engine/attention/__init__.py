"""The seat of an attention backend: what a model asks of whatever computes attention over the paged KV cache."""

from typing import Protocol

import torch

from kvferry_engine.batch import ForwardBatch
from kvferry_engine.kv_pool import KVPool


class AttentionPlan(Protocol):
    """One step's attention, planned once and run by every layer; valid until the backend plans the next step."""

    def append_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write this step's keys and values, each [T, kv heads, head dim], to their places in the pool."""

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend from q [T, heads, head dim] to all tokens of its sequence up to its own; the same shape."""


class LatentHeads(Protocol):
    """How the heads of one layer read latents: H heads, R elements of a latent, P of the turned part of the key."""

    scale: float
    """What the scores are multiplied by."""

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, query dim] that score latents as they are kept: [T, H, R + P]."""

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        """What each head makes of its weighted sum of latents, [T, H, R + P], of which the P say nothing.

        Returns [T, H, value dim].
        """

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [H, n, query dim] and values [H, n, value dim] of latents [n, R + P] as they are kept."""


class LatentPlan(Protocol):
    """One step's latent attention (MLA); valid until the backend plans the next step."""

    def append(self, layer: int, latents: torch.Tensor) -> None:
        """Write what this step's tokens keep, [T, R + P], to its places in the pool."""

    def run(self, layer: int, q: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """Attend from q [T, H, query dim] to all tokens of its sequence up to its own; returns [T, H, value dim]."""


class AttentionBackend(Protocol):
    """Plans steps; one backend serves one model on one device, from one thread."""

    def plan(self, batch: ForwardBatch, pool: KVPool) -> AttentionPlan:
        """Do everything that does not depend on the layer: gather indices, masks, work space."""

    def plan_latent(self, batch: ForwardBatch, pool: KVPool) -> LatentPlan:
        """Do the same for a pool of latents."""
