"""Decode steps as CUDA graphs: captured once for each size of batch, replayed with other numbers in the same places.

A step of a small model is some hundred kernels, which take the host longer to launch than the GPU to run. A graph is
launched at once. Batches between two sizes repeat their last sequence, which then writes the same keys and values to
the same place again. What doesn't fit is computed as ever.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from kvferry_engine.attention.flashinfer_cuda import FlashInferAttention, FlashInferDecode
from kvferry_engine.batch import ForwardBatch
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models.base import Model

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences that a graph is captured for."""
WARM_UPS = 2
"""Times that a step runs before it is captured: libraries set themselves up in their first calls."""


def can_capture(model: Model) -> bool:
    """Whether a step of the model never waits for the GPU: it has no experts, one rank, and FlashInfer's attention."""
    config = model.config
    plain = config.experts is None and config.latent is None and not model.drafts
    return plain and model.shard.group is None and isinstance(model.attention, FlashInferAttention)


class DecodeGraphs:
    """The graphs of one model over one pool; for the forward thread alone."""

    def __init__(self, model: Model, pool: KVPool) -> None:
        """Capture nothing yet: each size is when it is first needed."""
        assert isinstance(model.attention, FlashInferAttention)
        self._model, self._pool, self._attention = model, pool, model.attention
        self._graphs: dict[int, _Graph] = {}

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether a batch is one token of each sequence, all of whose logits are wanted, and not too many of them."""
        return len(batch) <= SIZES[-1] and batch.token_count == len(batch) == len(batch.logit_rows)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of a batch that fits, as `Model.forward` gives them; they last until the next call."""
        self._model.check(batch, self._pool)
        size = next(each for each in SIZES if each >= len(batch))
        if size not in self._graphs:
            self._graphs[size] = _Graph(self._model, self._pool, self._attention, size)
        return self._graphs[size].run(batch)


class _Graph:
    """The step for one size of batch, and the places that its numbers are read from."""

    def __init__(self, model: Model, pool: KVPool, attention: FlashInferAttention, size: int) -> None:
        self._model, self._pool, self._attention, self._size = model, pool, attention, size
        device = pool.tensor.device
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._rows = torch.arange(size, device=device)
        longest = min(model.config.max_positions, pool.pages * pool.layout.page_size)
        self._plan: FlashInferDecode = attention.fixed(pool, size, pool.layout.pages_for(longest))
        self._replay: Callable[[], None] | None = None
        self._logits: torch.Tensor | None = None

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Fill the places, and compute."""
        tokens, positions = (np.pad(each, (0, self._size - len(batch)), mode="edge") for each in _numbers(batch))
        self._tokens.copy_(torch.from_numpy(tokens))
        self._positions.copy_(torch.from_numpy(positions))
        self._plan.fill(batch)
        if self._replay is None:
            fixed = replace(batch, tokens=self._tokens, positions=self._positions, logit_rows=self._rows)
            self._replay = capture(lambda: self._compute(fixed))
        self._replay()
        assert self._logits is not None
        return self._logits[: len(batch)]

    def _compute(self, batch: ForwardBatch) -> None:
        with self._attention.holding(self._plan):
            self._logits = self._model.forward(batch, self._pool)


def capture(compute: Callable[[], None]) -> Callable[[], None]:
    """Run `compute` to warm up, capture it, and return what replays it."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            compute()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph.replay


def _numbers(batch: ForwardBatch) -> tuple[np.ndarray, np.ndarray]:
    return batch.token_ids, batch.kv_lens - 1
