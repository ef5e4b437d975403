"""Layers that models share: grouped-query attention, the gated MLP, and how a decoder layer joins the two.

Shapes: T tokens of the batch, E hidden size, H heads, K KV heads, D head dimension, F intermediate size; H, K
and F are those of this rank, whose outputs are the sum over the ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kvferry_engine.attention import AttentionPlan
from kvferry_engine.config import ModelConfig
from kvferry_engine.kernels import kernels_for
from kvferry_engine.models.linear import Linear
from kvferry_engine.models.norms import HeadNorm
from kvferry_engine.models.parameters import Parameters
from kvferry_engine.models.rope import Turn, rotate

Attention = Callable[[int, torch.Tensor, Turn, Any], torch.Tensor]
"""Layer, x [T, E], the positions' turn, and the step's plan of the kind that this attention runs -> [T, E]."""
FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""x [T, E] -> [T, E], each row by itself."""


class GroupedQueryAttention:
    """Rotary attention over the paged cache, H / K query heads to a KV head; q, k and v are one fused projection."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, *, normalise_heads: bool = False
    ) -> None:
        heads, kv_heads = parameters.shard.query_heads(config), parameters.shard.kv_heads(config)
        self.heads, self.kv_heads, self.head_dim = heads.size, kv_heads.size, config.head_dim
        q, kv = heads.times(config.head_dim), kv_heads.times(config.head_dim)
        parts = [(f"{prefix}.q_proj", q), (f"{prefix}.k_proj", kv), (f"{prefix}.v_proj", kv)]
        self.qkv: Linear = parameters.linear(parts, config.hidden_size, bias=config.attention_bias)
        self.output: Linear = parameters.linear(
            [(f"{prefix}.o_proj", config.hidden_size)], q, bias=config.attention_bias
        )
        self.head_norm: HeadNorm | None = None
        if normalise_heads:
            weights = parameters.rows([f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"], config.head_dim)
            self.head_norm = HeadNorm(weights, config.rms_norm_eps, heads=self.heads, kv_heads=self.kv_heads)

    def __call__(self, layer: int, x: torch.Tensor, turn: Turn, plan: AttentionPlan) -> torch.Tensor:
        """Attend from x [T, E], after writing its keys and values; returns [T, E]."""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)  # [T, H + 2 K, D]
        qk, v = qkv.split_with_sizes((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        q, k = rotate(qk, *turn).split_with_sizes((self.heads, self.kv_heads), dim=1)
        plan.append_kv(layer, k, v)
        return self.output(plan.run(layer, q).view(len(x), -1))  # [T, H D] -> [T, E]


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    @classmethod
    def dense(cls, config: ModelConfig, parameters: Parameters, prefix: str) -> "GatedMlp":
        """Allocate the MLP that every token passes."""
        return cls.of_size(config, parameters, prefix, config.intermediate_size)

    @classmethod
    def of_size(cls, config: ModelConfig, parameters: Parameters, prefix: str, size: int) -> "GatedMlp":
        """Allocate an MLP with `size` elements, over all ranks, between its two halves."""
        share = parameters.shard.even(size)
        parts = [(f"{prefix}.gate_proj", share), (f"{prefix}.up_proj", share)]
        return cls(
            parameters.linear(parts, config.hidden_size, bias=config.mlp_bias),
            parameters.linear([(f"{prefix}.down_proj", config.hidden_size)], share, bias=config.mlp_bias),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each row of x [T, E]."""
        return self.down(silu_times(self.gate_up(x)))  # [T, 2 F] -> [T, F] -> [T, E]


def silu_times(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, one behind the other in [T, 2 F]; returns [T, F]."""
    if (kernels := kernels_for(gate_up.dtype, gate_up.device)) is not None:
        return kernels.silu_times(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


class DecoderLayer:
    """Attention and feed-forward, each on the normalised residual stream and added back to it."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        prefix: str,
        *,
        attention: Attention,
        feed_forward: FeedForward,
    ) -> None:
        self.attention_norm = parameters.norm(f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.mlp_norm = parameters.norm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = feed_forward

    def attend(self, layer: int, x: torch.Tensor, turn: Turn, plan: Any) -> torch.Tensor:  # noqa: ANN401
        """First half of the layer, x [T, E]; when it returns, the layer's keys and values are in the pool."""
        return x + self.attention(layer, self.attention_norm(x), turn, plan)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Second half of the layer, x [T, E]."""
        return x + self.mlp(self.mlp_norm(x))
