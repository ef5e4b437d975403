"""A model's layers as one call into C, for the few rows of a decode step and, with AMX, for any number of them.

Between two products of a decode step Python takes longer than the products do, and so does waking a thread for each.
With many rows what a product gives is still in the cache when something is made of it.

The numbers are those of the layers themselves, to the bit.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch

from kvferry_engine.attention.kernel_cpu import KernelPlan
from kvferry_engine.config import ModelConfig
from kvferry_engine.kernel_layers import Dense, Ends, KernelLayers, Shape
from kvferry_engine.kernels import AMX, kernels_for
from kvferry_engine.models.base import OnLayer, ignore
from kvferry_engine.models.layers import DecoderLayer, GatedMlp, GroupedQueryAttention
from kvferry_engine.models.linear import Linear, most_rows


class DenseStack:
    """Layers of grouped-query attention and a gated MLP."""

    def __init__(self, layers: KernelLayers, count: int, rows: int, *, chunks: bool) -> None:
        self._layers = layers
        self._count = count
        self._most = rows
        self._chunks = chunks

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
        stack = KernelLayers(kernels, dense, shape, ends)
        return cls(stack, len(layers), most_rows(kernels), chunks=kernels.level == AMX)

    def few(self, rows: int) -> bool:
        """Whether rows are few enough for `score` and `finish`."""
        return rows <= self._most

    def takes(self, rows: int, plan: object) -> TypeGuard[KernelPlan]:
        """Whether a step of so many rows can be run as one: with AMX any, else few that attend by themselves."""
        return isinstance(plan, KernelPlan) and (self._chunks or (rows <= self._most and plan.by_rows))

    def score(self, tokens: torch.Tensor, positions: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Run all, from the embeddings of tokens [T] to their logits, float32 [T, vocabulary]."""
        return self._layers.score(tokens, 2 * self._count, positions, plan)

    def attend(self, x: torch.Tensor, positions: torch.Tensor, plan: KernelPlan, on_layer: OnLayer) -> None:
        """Run all but the last feed-forward on x [T, E], in place; on_layer is told of each layer's attention."""
        run = self._layers.over(x, positions, plan)
        if on_layer is ignore:
            run(0, 2 * self._count - 1)
            return
        for layer in range(self._count):
            run(max(0, 2 * layer - 1), 2 * layer + 1)
            on_layer(layer)

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
