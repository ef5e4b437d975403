"""Multi-head latent attention (MLA): a token keeps one short vector, of which every head makes key and value.

Shapes: T tokens of the batch, E hidden size, H heads of this rank, R elements of a latent, P elements of the part of a
head that the position turns, N elements of the part that it doesn't, V elements of a value head. Every rank keeps the
same latents.
"""

import torch

from kvferry_engine.attention import LatentPlan
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError
from kvferry_engine.latent_config import LatentConfig
from kvferry_engine.models.linear import Linear, multiply_each
from kvferry_engine.models.parameters import Parameters, Size
from kvferry_engine.models.rope import Turn, rotate, rotate_pairs

INNER_EPS = 1e-6
"""Of the two norms inside, whatever the configuration says of the others: the reference has it so."""


class UpProjection:
    """Keys and values of all heads out of latents, by one matrix [H (N + V), R], or that matrix on the other side.

    A score is q . (W k) = (W^T q) . k, so W can be applied to one query instead of to all the keys; a weighted sum of
    W v is W times the weighted sum of v.
    """

    def __init__(self, weight: torch.Tensor, config: LatentConfig, scale: float) -> None:
        self.scale = scale
        self._sizes = config
        self._weight = weight
        keys_and_values = weight.view(-1, config.nope_dim + config.value_dim, config.rank)
        self._keys, self._values = keys_and_values.split_with_sizes((config.nope_dim, config.value_dim), dim=1)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, N + P] that score latents as they are kept: [T, H, R + P]."""
        plain, turned = q.split_with_sizes((self._sizes.nope_dim, self._sizes.rope_dim), dim=-1)
        return torch.cat((multiply_each(plain.transpose(0, 1), self._keys).transpose(0, 1), turned), dim=-1)

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        """What each head makes of its weighted sum of latents, [T, H, R + P], of which the P say nothing: [T, H, V]."""
        latents = mixed[..., : self._sizes.rank].transpose(0, 1)
        return multiply_each(latents, self._values.transpose(1, 2)).transpose(0, 1)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [H, n, N + P] and values [H, n, V] of latents [n, R + P] as they are kept."""
        sizes = self._sizes
        up = Linear(self._weight)(latents[:, : sizes.rank].contiguous())
        heads = up.view(len(latents), -1, sizes.nope_dim + sizes.value_dim).transpose(0, 1)
        k, v = heads.split_with_sizes((sizes.nope_dim, sizes.value_dim), dim=-1)
        turned = latents[:, sizes.rank :].expand(len(heads), -1, -1)
        return torch.cat((k, turned), dim=-1), v


class LatentAttention:
    """Attention over latents; queries too may come out of a short vector of their own."""

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str) -> None:
        sizes = _sizes(config)
        self.sizes = sizes
        heads = parameters.shard.query_heads(config)
        down: list[tuple[str, Size]] = [(f"{prefix}.kv_a_proj_with_mqa", sizes.kept_dim)]
        self.query_norm = None
        if sizes.query_rank is not None:
            down.insert(0, (f"{prefix}.q_a_proj", sizes.query_rank))
            self.query_norm = parameters.norm(f"{prefix}.q_a_layernorm", sizes.query_rank, INNER_EPS)
        self.down = parameters.linear(down, config.hidden_size, bias=config.attention_bias)
        self.queries = parameters.linear(
            [(f"{prefix}.{'q_proj' if sizes.query_rank is None else 'q_b_proj'}", heads.times(sizes.query_dim))],
            config.hidden_size if sizes.query_rank is None else sizes.query_rank,
        )
        self.latent_norm = parameters.norm(f"{prefix}.kv_a_layernorm", sizes.rank, INNER_EPS)
        up = parameters.linear([(f"{prefix}.kv_b_proj", heads.times(sizes.nope_dim + sizes.value_dim))], sizes.rank)
        self.up = UpProjection(up.weight, sizes, config.rope.score_magnitude * sizes.query_dim**-0.5)
        self.output = parameters.linear(
            [(f"{prefix}.o_proj", config.hidden_size)], heads.times(sizes.value_dim), bias=config.attention_bias
        )
        self._rotate = rotate_pairs if sizes.interleaved else rotate

    def __call__(self, layer: int, x: torch.Tensor, turn: Turn, plan: LatentPlan) -> torch.Tensor:
        """Attend from x [T, E], after writing what its tokens keep; returns [T, E]."""
        down = self.down(x)
        self._keep(layer, down, turn, plan)
        source = x if self.query_norm is None else self.query_norm(down[:, : self.sizes.query_rank])
        q = self.queries(source).view(len(x), -1, self.sizes.query_dim)  # [T, H, N + P]
        plain, turned = q.split_with_sizes((self.sizes.nope_dim, self.sizes.rope_dim), dim=-1)
        q = torch.cat((plain, self._rotate(turned, *turn)), dim=-1)
        return self.output(plan.run(layer, q, self.up).reshape(len(x), -1))  # [T, H V] -> [T, E]

    def keep(self, layer: int, x: torch.Tensor, turn: Turn, plan: LatentPlan) -> None:
        """Write what the tokens of x [T, E] keep, and attend to nothing."""
        self._keep(layer, self.down(x), turn, plan)

    def _keep(self, layer: int, down: torch.Tensor, turn: Turn, plan: LatentPlan) -> None:
        latent, key = down[:, -self.sizes.kept_dim :].split_with_sizes((self.sizes.rank, self.sizes.rope_dim), dim=-1)
        turned = self._rotate(key.unsqueeze(1), *turn).squeeze(1)
        plan.append(layer, torch.cat((self.latent_norm(latent), turned), dim=-1))


def _sizes(config: ModelConfig) -> LatentConfig:
    if config.latent is None:
        msg = f"{config.architecture} needs kv_lora_rank in its config.json"
        raise ModelError(msg)
    return config.latent
