"""What one tensor-parallel rank holds of a model, and how the ranks join what each has computed.

Query heads go with their KV head; KV heads fewer than ranks are held by several of them. An MLP, and every expert, is
split along its intermediate size: all ranks are equally busy whatever the router chooses, which whole experts on
different ranks would not be. Embedding and head are split along the vocabulary: together they are the largest
matrices of a small model, and the head is read in every decode step.
"""

from typing import NamedTuple, Protocol

import torch

from kvferry_engine.config import ModelConfig
from kvferry_engine.split import heads_alone


class Cut(NamedTuple):
    """The run of a dimension that a rank holds."""

    whole: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements held."""
        return self.stop - self.start

    @property
    def partial(self) -> bool:
        """Whether other ranks hold something that this one does not."""
        return self.size != self.whole

    def times(self, inner: int) -> "Cut":
        """Return the same cut where each element is `inner` of them."""
        return Cut(self.whole * inner, self.start * inner, self.stop * inner)


def uncut(size: int) -> Cut:
    """Return the cut of a dimension that every rank holds whole."""
    return Cut(size, 0, size)


class Group(Protocol):
    """The ranks of a node, as one of them reaches the others. All ranks make the same calls in the same order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up x over the ranks, in place; every rank gets the sum."""

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return x of all ranks, [ranks, *x.shape], on rank 0; None elsewhere."""


class Shard:
    """A rank's place among `ranks`."""

    def __init__(self, rank: int = 0, ranks: int = 1, group: Group | None = None) -> None:
        """`group` is needed, and used, where there are several ranks."""
        self.rank = rank
        self.ranks = ranks
        self.group = group if ranks > 1 else None

    def even(self, size: int) -> Cut:
        """Cut a dimension that the ranks divide, as `check_ranks` has seen to."""
        return Cut(size, self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks)

    def padded(self, size: int) -> Cut:
        """Cut a dimension of any size: runs of `padded_size`, of which the last ones may be shorter or empty."""
        step = self.padded_size(size)
        return Cut(size, min(size, self.rank * step), min(size, (self.rank + 1) * step))

    def padded_size(self, size: int) -> int:
        """Longest run that a rank holds of a dimension cut by `padded`."""
        return -(-size // self.ranks)

    def query_heads(self, config: ModelConfig) -> Cut:
        """Query heads of this rank."""
        return self.even(config.heads)

    def kv_heads(self, config: ModelConfig) -> Cut:
        """KV heads of this rank, by the arithmetic of `KVLayout`."""
        layout = heads_alone(config, self.ranks)
        first = layout.first_head(self.rank)
        return Cut(config.kv_heads, first, first + layout.heads_per_rank)


ALONE = Shard()
