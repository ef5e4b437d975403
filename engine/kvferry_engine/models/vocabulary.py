"""What has a row per token of the vocabulary: the embedding, and the head that scores every token.

Each rank holds a run of the vocabulary. Runs are equally long but for the last, so that logits can be gathered.
"""

import torch
from torch.nn import functional

from kvferry_engine.config import ModelConfig
from kvferry_engine.kernels import kernels_for
from kvferry_engine.models.linear import Linear, most_rows
from kvferry_engine.models.parameters import Parameters


class Embedding:
    """Token ids to rows of a table, [V, E] over all ranks."""

    def __init__(self, parameters: Parameters, name: str, config: ModelConfig) -> None:
        shard = parameters.shard
        self.tokens = shard.padded(config.vocab_size)
        self.group = shard.group
        self.table = parameters.table(
            name, self.tokens, config.hidden_size, height=shard.padded_size(config.vocab_size)
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed tokens, int64 [T]; returns [T, E]."""
        if self.group is None:
            return functional.embedding(tokens, self.table)
        elsewhere = (tokens < self.tokens.start) | (tokens >= self.tokens.stop)
        x = functional.embedding((tokens - self.tokens.start).masked_fill_(elsewhere, 0), self.table)
        return self.group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))


class Head:
    """The logits of every token: x times its row of a table."""

    def __init__(self, table: Embedding) -> None:
        self.table = table.table
        self._linear = Linear(table.table)
        self._kernels = kernels_for(table.table.dtype, table.table.device)
        self._group, self._vocab_size = table.group, table.tokens.whole

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """Score x [B, E]; returns float32 [B, V] on the first rank, None on the others."""
        if self._group is None and self._kernels is not None and len(x) <= most_rows(self._kernels):
            return self._kernels.score(x, self._linear.weight)
        logits = self._linear(x)
        if self._group is None:
            return logits.float()
        shares = self._group.gather(logits)  # [ranks, B, longest run of tokens]
        if shares is None:
            return None
        return shares.transpose(0, 1).flatten(1)[:, : self._vocab_size].float()
