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


class AttentionBackend(Protocol):
    """Plans steps; one backend serves one model on one device, from one thread."""

    def plan(self, batch: ForwardBatch, pool: KVPool) -> AttentionPlan:
        """Do everything that does not depend on the layer: gather indices, masks, work space."""
