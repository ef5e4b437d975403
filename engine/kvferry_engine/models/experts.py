"""Mixture of experts: a router sends each token to a few of many small MLPs and weighs what they answer.

Shapes: T tokens of the batch, E hidden size, F this rank's share of an expert's intermediate size, k experts
per token. All ranks route alike: each holds the whole router.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from kvferry_engine.experts_config import ExpertsConfig
from kvferry_engine.models.layers import GatedMlp
from kvferry_engine.models.linear import Linear
from kvferry_engine.models.parameters import Parameters

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x [T, E] -> weights in x's dtype and experts, int64, each [T, k]; a token's k experts differ."""


class SoftmaxRouter:
    """The k most likely experts of a softmax over all of them, weighed by their probabilities."""

    def __init__(self, config: ExpertsConfig, parameters: Parameters, prefix: str, hidden_size: int) -> None:
        self.per_token, self.normalise = config.per_token, config.normalise
        self.gate: Linear = parameters.linear([(prefix, config.count)], hidden_size)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route each row of x [T, E]."""
        probabilities = self.gate(x).float().softmax(dim=-1)  # [T, experts]
        weights, experts = probabilities.topk(self.per_token, dim=-1)
        if self.normalise:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts


class SigmoidRouter:
    """Experts scored one by one, chosen among the best groups, with a bias that balances their load.

    The bias decides who is chosen and never how much they weigh. Scores are computed in float32, whatever the model's
    dtype: they lie close to one another.
    """

    def __init__(self, config: ExpertsConfig, parameters: Parameters, prefix: str, hidden_size: int) -> None:
        self.config = config
        self.gate = parameters.tensor(f"{prefix}.weight", config.count, hidden_size, dtype=torch.float32)
        self.bias = parameters.tensor(f"{prefix}.e_score_correction_bias", config.count, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route each row of x [T, E]."""
        scores = functional.linear(x.float(), self.gate).sigmoid()  # [T, experts]
        experts = self._allowed(scores + self.bias).topk(self.config.per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.config.normalise:
            weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
        return (weights * self.config.scale).to(x.dtype), experts

    def _allowed(self, ranking: torch.Tensor) -> torch.Tensor:
        """`ranking` [T, experts] with minus infinity outside each token's best groups, judged by their best two."""
        groups, top = self.config.groups, self.config.top_groups
        if top == groups:
            return ranking
        grouped = ranking.view(len(ranking), groups, -1)  # [T, groups, experts of a group]
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(top, dim=-1).indices
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranking.device).scatter_(1, best, value=False)
        return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)


class Experts:
    """Gated MLPs, each run once per step on all the tokens that were routed to it."""

    def __init__(
        self, config: ExpertsConfig, parameters: Parameters, prefix: str, hidden_size: int, router: Router
    ) -> None:
        size = parameters.shard.even(config.intermediate_size)
        self._group = parameters.shard.group
        names = [f"{prefix}.{index}" for index in range(config.count)]
        gate_up = parameters.linears(
            f"{prefix}.gate_up_proj",
            [[(f"{name}.gate_proj", size), (f"{name}.up_proj", size)] for name in names],
            hidden_size,
        )
        down = parameters.linears(f"{prefix}.down_proj", [[(f"{name}.down_proj", hidden_size)] for name in names], size)
        self.router = router
        self.experts = [GatedMlp(*pair) for pair in zip(gate_up, down, strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Weighted sum of what its experts make of each row of x [T, E]."""
        weights, chosen = self.router(x)  # [T, k] each
        pairs = chosen.flatten()  # Pair t * k + j: token t with the j-th of its experts.
        order = pairs.argsort()
        counts = pairs.bincount(minlength=len(self.experts)).tolist()
        groups = x[order // chosen.shape[1]].split_with_sizes(counts)
        answers = torch.cat([expert(rows) for expert, rows in zip(self.experts, groups, strict=True) if len(rows)])
        # Back in the order of the pairs, so that a token's sum does not depend on who else is in the batch.
        answers = torch.empty_like(answers).index_copy_(0, order, answers).view(*chosen.shape, -1)  # [T, k, E]
        total = (answers * weights.unsqueeze(-1)).sum(dim=1)
        return total if self._group is None else self._group.all_reduce(total)


class SharedExperts:
    """Experts that are chosen, and an MLP beside them that every token passes."""

    def __init__(self, experts: Experts, shared: GatedMlp) -> None:
        self.experts, self.shared = experts, shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each row of x [T, E]."""
        return self.experts(x).add_(self.shared(x))
