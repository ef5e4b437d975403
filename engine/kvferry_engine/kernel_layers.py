"""Whole layers in C: the structures of csrc/kernels.h that kv_run_layers reads."""

from collections.abc import Callable, Sequence
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


class Ends(NamedTuple):
    """What is before and behind the layers, in bfloat16."""

    embedding: torch.Tensor
    """[vocabulary, E]."""
    norm: torch.Tensor
    head: torch.Tensor
    """[vocabulary, E]; may be the embedding."""
    cos: torch.Tensor
    """Of every position, [positions, D]; sines are signed, as for `rotate`."""
    sin: torch.Tensor


class KernelLayers:
    """Layers of the same sizes."""

    def __init__(self, kernels: Kernels, layers: Sequence[Dense], shape: Shape, ends: Ends) -> None:
        self._kernels = kernels
        self._weights, self._ends = layers, ends  # C has addresses alone
        self._dense = kernels.new("KvDense[]", [[kernels.at(weight) for weight in layer] for layer in layers])
        hidden, between = layers[0].down.shape
        self._stack = kernels.new(
            "KvStack *",
            {name: kernels.at(weight) for name, weight in ends._asdict().items()}
            | {
                "layers": self._dense,
                "vocabulary": len(ends.head),
                "hidden": hidden,
                "heads": shape.heads,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "between": between,
                "eps": shape.eps,
                "scale": shape.head_dim**-0.5,
            },
        )

    def score(self, tokens: torch.Tensor, halves: int, positions: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Run all `halves` of the layers on the embeddings of tokens [T]; returns logits, float32 [T, vocabulary]."""
        vocabulary, size = self._ends.head.shape
        x = torch.empty((len(tokens), size), dtype=torch.bfloat16)
        logits = torch.empty((len(tokens), vocabulary), dtype=torch.float32)
        ends = {"tokens": self._kernels.ints(tokens), "logits": self._kernels.floats(logits)}
        self._run(x, 0, halves, ends | self._attention(positions, plan))
        return logits

    def over(self, x: torch.Tensor, positions: torch.Tensor, plan: KernelPlan) -> Callable[[int, int], None]:
        """Return what runs halves [first, end) of the layers on x [T, E], dense, in place.

        Half 2 l is the attention of layer l, 2 l + 1 its MLP.
        """
        step = self._step(x, self._attention(positions, plan))
        return lambda first, end: self._kernels.run_layers(self._stack, step, first, end)

    def feed_forward(self, x: torch.Tensor, layer: int) -> None:
        """Run the MLP of a layer on x [T, E], dense, in place."""
        self._run(x, 2 * layer + 1, 2 * layer + 2, {})

    def _attention(self, positions: torch.Tensor, plan: KernelPlan) -> dict[str, Any]:
        return {"positions": self._kernels.ints(positions)} | plan.step()

    def _run(self, x: torch.Tensor, first: int, end: int, more: dict[str, Any]) -> None:
        self._kernels.run_layers(self._stack, self._step(x, more), first, end)

    def _step(self, x: torch.Tensor, more: dict[str, Any]) -> Any:  # noqa: ANN401 - a structure of cffi
        return self._kernels.new("KvStep *", {"x": self._kernels.at(x), "rows": len(x)} | more)
