"""What is measured, the same for every system."""

import random
from typing import NamedTuple, Protocol

CONTEXT = 128
"""Tokens of every sequence before its first decode step."""


class Case(NamedTuple):
    """One phase at one size."""

    phase: str
    """decode or prefill."""
    size: int
    """decode: sequences in the batch; prefill: tokens of the prompt."""


class System(Protocol):
    """Something that runs the model."""

    name: str

    def prefill(self, tokens: int) -> float:
        """Seconds that one prompt of so many tokens takes, to its first answer token."""

    def decode(self, batch: int, steps: int) -> float:
        """Seconds that `steps` greedy tokens of each of `batch` sequences take, after CONTEXT tokens each."""


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt: random ones cost what real ones do."""
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(tokens)]
