"""A model's tensors while it is built, and which tensors of a checkpoint fill them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry_engine.models.linear import Linear
from kvferry_engine.models.norms import RmsNorm

Parts = Sequence[tuple[str, int]]
"""Checkpoint prefix and outputs of each linear map that is fused with its neighbours, in order."""


@dataclass(frozen=True)
class Fused:
    """A tensor that some checkpoints store whole and others in parts."""

    tensor: torch.Tensor
    parts: tuple[str, ...]
    """Names in `Parameters.targets` that fill it together."""


class Parameters:
    """Tensors of a model under construction, and which checkpoint tensor fills which of their rows."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self.targets: dict[str, torch.Tensor] = {}
        """Checkpoint name -> the view that its tensor is copied into."""
        self.fused: dict[str, Fused] = {}
        """Checkpoint name -> what a checkpoint may store under it instead of the parts."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Allocate a parameter that the checkpoint tensor `name` fills."""
        self.targets[name] = value = self._empty(*shape)
        return value

    def rows(self, names: Sequence[str], size: int) -> torch.Tensor:
        """Allocate [names, size]; the checkpoint tensor of each name, [size], fills its row."""
        value = self._empty(len(names), size)
        self.targets.update(zip(names, value, strict=True))
        return value

    def linear(self, parts: Parts, inputs: int, *, bias: bool = False) -> Linear:
        """Allocate one linear map whose outputs are those of `parts`, one after the other."""
        outputs = sum(size for _, size in parts)
        weight = self._empty(outputs, inputs)
        self._place(weight, parts, "weight")
        offsets = self._empty(outputs) if bias else None
        if offsets is not None:
            self._place(offsets, parts, "bias")
        return Linear(weight, offsets)

    def linears(self, name: str, members: Sequence[Parts], inputs: int) -> list[Linear]:
        """Allocate linear maps of one shape, one for each of `members`, in one tensor [members, outputs, inputs].

        Checkpoints store it whole under `name`, or in the members' parts.
        """
        weights = self._empty(len(members), sum(size for _, size in members[0]), inputs)
        for weight, parts in zip(weights, members, strict=True):
            self._place(weight, parts, "weight")
        names = tuple(f"{prefix}.weight" for parts in members for prefix, _ in parts)
        self.fused[name] = Fused(weights, names)
        return [Linear(weight) for weight in weights]

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """Allocate an RMSNorm over `size` elements."""
        return RmsNorm(self.tensor(f"{name}.weight", size), eps)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _place(self, value: torch.Tensor, parts: Parts, kind: str) -> None:
        pieces = value.split_with_sizes([size for _, size in parts])
        self.targets.update({f"{prefix}.{kind}": piece for (prefix, _), piece in zip(parts, pieces, strict=True)})
