"""What the machine itself allows: the weights read once a step, and multiplied at a matrix product's rate."""

import time
from collections.abc import Callable

import torch

_READ = 1 << 27
"""float32 elements of the memory that is read: 512 MiB, far beyond any cache."""
_SIDE = 2048


class Limit:
    """Bounds, measured anew every time that they are asked for, so that they meet the same noise as the rest."""

    name = "limit"

    def __init__(self, weight_bytes: int) -> None:
        self._weight_bytes = weight_bytes
        self._memory = torch.ones(_READ)

    def decode(self, batch: int, steps: int) -> float:
        """A step reads all weights, whatever the batch."""
        del batch
        return steps * self._weight_bytes / (self._memory.nbytes / _seconds(self._memory.sum))

    def prefill(self, tokens: int) -> float:
        """Two operations for each weight and token, in the faster of bfloat16 and float32: both are exact enough."""
        operations = 2 * (self._weight_bytes / 2) * tokens
        return operations / max(_rate(torch.bfloat16, 256), _rate(torch.float32, _SIDE))


def _rate(dtype: torch.dtype, side: int) -> float:
    """Floating point operations per second of a square matrix product."""
    left = right = torch.ones(side, side, dtype=dtype)
    return 2 * side**3 / _seconds(lambda: left @ right)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
