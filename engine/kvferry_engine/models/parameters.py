"""A rank's tensors of a model while it is built, and which tensors of a checkpoint, or which slices, fill them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry_engine.models.linear import Linear
from kvferry_engine.models.norms import RmsNorm
from kvferry_engine.models.weight_memory import WeightMemory
from kvferry_engine.shard import ALONE, Cut, Shard, uncut

Size = int | Cut
"""A dimension that every rank holds whole, or what this rank holds of it."""
Parts = Sequence[tuple[str, Size]]
"""Checkpoint prefix and outputs of each linear map that is fused with its neighbours, in order."""


@dataclass(frozen=True)
class Slice:
    """What a rank holds of a checkpoint tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    index: tuple[slice, ...]


@dataclass(frozen=True)
class Fused:
    """A tensor that some checkpoints store whole and others in parts."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    parts: dict[str, tuple[int | slice, ...]]
    """Names in `Parameters.targets` that fill it together -> where each stands in it."""


class Parameters:
    """Tensors of a model under construction, and which checkpoint tensor fills which of their rows."""

    def __init__(self, dtype: torch.dtype, device: str, shard: Shard = ALONE) -> None:
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self._memory = WeightMemory() if device == "cpu" else None
        self.targets: dict[str, torch.Tensor] = {}
        """Checkpoint name -> the view that its tensor is copied into."""
        self.slices: dict[str, Slice] = {}
        """Checkpoint name -> what of its tensor is copied; names that are not here are copied whole."""
        self.fused: dict[str, Fused] = {}
        """Checkpoint name -> what a checkpoint may store under it instead of the parts."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a parameter that the checkpoint tensor `name` fills, in the model's dtype unless told."""
        self.targets[name] = value = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return value

    def rows(self, names: Sequence[str], size: int) -> torch.Tensor:
        """Allocate [names, size]; the checkpoint tensor of each name, [size], fills its row."""
        value = self._empty(len(names), size)
        self.targets.update(zip(names, value, strict=True))
        return value

    def table(self, name: str, rows: Cut, columns: int, *, height: int) -> torch.Tensor:
        """Allocate [height, columns], the first rows of which are `rows` of the checkpoint tensor, the others zeros."""
        value = self._empty(height, columns)
        value[rows.size :].zero_()
        self._place(name, value[: rows.size], (rows, uncut(columns)))
        return value

    def linear(self, parts: Parts, inputs: Size, *, bias: bool = False) -> Linear:
        """Allocate one linear map whose outputs are those of `parts`, one after the other.

        Where `inputs` are cut, each rank's outputs are a summand: they are added up over the ranks.
        """
        cuts, of_inputs = [(prefix, _cut(size)) for prefix, size in parts], _cut(inputs)
        outputs = sum(cut.size for _, cut in cuts)
        weight = self._empty(outputs, of_inputs.size)
        offsets = self._empty(outputs) if bias else None
        row = 0
        for prefix, cut in cuts:
            rows = slice(row, row + cut.size)
            self._place(f"{prefix}.weight", weight[rows], (cut, of_inputs))
            if offsets is not None:
                self._place(f"{prefix}.bias", offsets[rows], (cut,))
            row += cut.size
        group = self.shard.group if of_inputs.partial else None
        return Linear(weight, offsets, reduce=group.all_reduce if group else None)

    def linears(self, name: str, members: Sequence[Parts], inputs: Size) -> list[Linear]:
        """Allocate linear maps of one shape, one for each of `members`, in one tensor [members, outputs, inputs].

        Checkpoints store it whole under `name`, or in the members' parts. Where `inputs` are cut, whoever adds the
        members' outputs up adds them up over the ranks as well.
        """
        of_inputs = _cut(inputs)
        weights = self._empty(len(members), sum(_cut(size).size for _, size in members[0]), of_inputs.size)
        places: dict[str, tuple[int | slice, ...]] = {}
        for member, parts in enumerate(members):
            row = first = 0
            for prefix, cut in ((prefix, _cut(size)) for prefix, size in parts):
                part = f"{prefix}.weight"
                self._place(part, weights[member, row : row + cut.size], (cut, of_inputs))
                places[part] = (member, slice(first + cut.start, first + cut.stop), _index(of_inputs))
                row, first = row + cut.size, first + cut.whole
        self.fused[name] = Fused((len(members), first, of_inputs.whole), places)
        return [Linear(weight) for weight in weights]

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """Allocate an RMSNorm over `size` elements."""
        return RmsNorm(self.tensor(f"{name}.weight", size), eps)

    def _empty(self, *shape: int) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.zeros(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _place(self, name: str, value: torch.Tensor, cuts: tuple[Cut, ...]) -> None:
        self.targets[name] = value
        if any(cut.partial for cut in cuts):
            self.slices[name] = Slice(tuple(cut.whole for cut in cuts), tuple(_index(cut) for cut in cuts))


def _cut(size: Size) -> Cut:
    return uncut(size) if isinstance(size, int) else size


def _index(cut: Cut) -> slice:
    return slice(cut.start, cut.stop)
