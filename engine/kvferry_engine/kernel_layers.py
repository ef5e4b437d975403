"""Whole layers in C: the structures of csrc/kernels.h that kv_run_layers reads."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvferry_engine.attention.kernel_cpu import KernelPlan
from kvferry_engine.kernels import Kernels


class Dense(NamedTuple):
    """A layer's weights in bfloat16, in the order of a KvDense; linear maps are [outputs, inputs]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    head_norm: torch.Tensor | None
    """Of query heads and of key heads, [2, D]."""
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Shape(NamedTuple):
    """What all layers have in common beside the sizes of their weights."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


class KernelLayers:
    """Layers of the same sizes."""

    def __init__(self, kernels: Kernels, layers: Sequence[Dense], shape: Shape) -> None:
        self._kernels = kernels
        self._weights = layers  # C has addresses alone
        self._dense = kernels.new("KvDense[]", [[kernels.at(weight) for weight in layer] for layer in layers])
        hidden, between = layers[0].down.shape
        self._stack = kernels.new(
            "KvStack *",
            {
                "layers": self._dense,
                "hidden": hidden,
                "heads": shape.heads,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "between": between,
                "eps": shape.eps,
                "scale": shape.head_dim**-0.5,
            },
        )

    def run(
        self,
        x: torch.Tensor,
        first: int,
        end: int,
        *,
        turn: tuple[torch.Tensor, torch.Tensor] | None = None,
        plan: KernelPlan | None = None,
    ) -> None:
        """Run halves [first, end) of the layers on x [T, E], dense, in place.

        Half 2 l is the attention of layer l, 2 l + 1 its MLP. Attention wants `turn` and `plan`.
        """
        step: dict[str, Any] = {"x": self._kernels.at(x), "rows": len(x)}
        if plan is not None and turn is not None:
            step |= {"cos": self._kernels.at(turn[0]), "sin": self._kernels.at(turn[1])} | plan.step()
        self._kernels.run_layers(self._stack, self._kernels.new("KvStep *", step), first, end)
