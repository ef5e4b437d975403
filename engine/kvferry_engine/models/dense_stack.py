"""A model's layers as one call into C, for the few rows of a decode step: between two products Python takes longer than
the products do, and so does waking a thread for each.

The numbers are those of the layers themselves, to the bit.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch

from kvferry_engine.attention.kernel_cpu import KernelPlan
from kvferry_engine.config import ModelConfig
from kvferry_engine.kernel_layers import Dense, Ends, KernelLayers, Shape
from kvferry_engine.kernels import kernels_for
from kvferry_engine.models.layers import DecoderLayer, GatedMlp, GroupedQueryAttention
from kvferry_engine.models.linear import Linear, most_rows


class DenseStack:
    """Layers of grouped-query attention and a gated MLP."""

    def __init__(self, layers: KernelLayers, count: int, rows: int) -> None:
        self._layers = layers
        self._count = count
        self._most = rows

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], ends: Ends, config: ModelConfig) -> "DenseStack | None":
        """Return `layers` and `ends` as one, or None where there are no kernels for them."""
        found = [_dense(layer) for layer in layers]
        dense = [each for each in found if each is not None]
        first = layers[0].attention
        if len(dense) < len(found) or not isinstance(first, GroupedQueryAttention):
            return None
        weight = first.qkv.weight
        kernels = kernels_for(weight.dtype, weight.device)
        if kernels is None:
            return None
        shape = Shape(first.heads, first.kv_heads, first.head_dim, config.rms_norm_eps)
        return cls(KernelLayers(kernels, dense, shape, ends), len(layers), most_rows(kernels))

    def few(self, rows: int) -> bool:
        """Whether rows are few enough for what follows."""
        return rows <= self._most

    def attends(self, plan: object) -> TypeGuard[KernelPlan]:
        """Whether each token of a step attends by itself."""
        return isinstance(plan, KernelPlan) and plan.by_rows

    def score(self, tokens: torch.Tensor, positions: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Run all, from the embeddings of tokens [T] to their logits, float32 [T, vocabulary]."""
        return self._layers.score(tokens, 2 * self._count, positions, plan)

    def attend(self, x: torch.Tensor, positions: torch.Tensor, plan: KernelPlan) -> None:
        """Run all but the last feed-forward on x [T, E], in place."""
        self._layers.attend(x, 2 * self._count - 1, positions, plan)

    def finish(self, x: torch.Tensor) -> None:
        """Run the last feed-forward on rows of x [rows, E], in place."""
        self._layers.feed_forward(x, self._count - 1)


def _dense(layer: DecoderLayer) -> Dense | None:
    attention, mlp = layer.attention, layer.mlp
    if not (isinstance(attention, GroupedQueryAttention) and isinstance(mlp, GatedMlp)):
        return None
    maps = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    if not all(isinstance(each, Linear) and each.plain for each in maps):
        return None
    return Dense(
        attention_norm=layer.attention_norm.weight,
        qkv=attention.qkv.weight,
        head_norm=None if attention.head_norm is None else attention.head_norm.weights,
        output=attention.output.weight,
        mlp_norm=layer.mlp_norm.weight,
        gate_up=mlp.gate_up.weight,
        down=mlp.down.weight,
    )
