"""A model's layers as one call into C, for the few rows of a decode step: between two products Python takes longer than
the products do, and so does waking a thread for each.

The numbers are those of the layers themselves, to the bit.
"""

from collections.abc import Sequence

import torch

from kvferry_engine.attention.kernel_cpu import KernelPlan
from kvferry_engine.config import ModelConfig
from kvferry_engine.kernel_layers import Dense, KernelLayers, Shape
from kvferry_engine.kernels import kernels_for
from kvferry_engine.models.layers import DecoderLayer, GatedMlp, GroupedQueryAttention
from kvferry_engine.models.linear import Linear, most_rows
from kvferry_engine.models.rope import Turn


class DenseStack:
    """Layers of grouped-query attention and a gated MLP."""

    def __init__(self, layers: KernelLayers, count: int, rows: int) -> None:
        self._layers = layers
        self._most = rows
        self._last = 2 * count - 1
        """Half of a layer that is the last feed-forward."""

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], config: ModelConfig) -> "DenseStack | None":
        """Return `layers` as one, or None where there are no kernels for them."""
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
        return cls(KernelLayers(kernels, dense, shape), len(layers), most_rows(kernels))

    def takes(self, x: torch.Tensor, plan: object) -> bool:
        """Whether a step is one for `attend`: few rows, each of which attends by itself."""
        return self.finishes(x) and isinstance(plan, KernelPlan) and plan.by_rows

    def finishes(self, x: torch.Tensor) -> bool:
        """Whether rows are few enough for `finish`."""
        return len(x) <= self._most

    def attend(self, x: torch.Tensor, turn: Turn, plan: KernelPlan) -> None:
        """Run all but the last feed-forward on x [T, E], in place."""
        self._layers.run(x, 0, self._last, turn=turn, plan=plan)

    def finish(self, x: torch.Tensor) -> None:
        """Run the last feed-forward on rows of x [rows, E], in place."""
        self._layers.run(x, self._last, self._last + 1)


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
