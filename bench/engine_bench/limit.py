"""What the machine itself allows: the weights read once a step, and multiplied at a matrix product's rate."""

import time
from collections.abc import Callable

import torch
from kvferry_engine.models.linear import Multiply, fastest
from kvferry_engine.models.weight_memory import WeightMemory
from torch.nn.functional import linear

_READ = 1 << 29
"""Bytes of the memory that is read, far beyond any cache."""
_STREAMS = 1024
"""Rows of it in bfloat16 where it is read as a matrix: threads read several of them at once."""
_ROWS, _SIDE = 512, 2048
"""Rows of a prefill pass, and a matrix that they are multiplied with."""
_TIMES = 5
"""The best of so many, after one that warms up: a limit is what the machine can do when nothing disturbs it."""


class Limit:
    """Bounds, measured anew every time that they are asked for, so that they meet the same noise as the rest."""

    name = "limit"

    def __init__(self, weight_bytes: int) -> None:
        self._weight_bytes = weight_bytes
        self._memory = WeightMemory().zeros((_STREAMS, _READ // 2 // _STREAMS), torch.bfloat16).fill_(1)

    def decode(self, batch: int, steps: int) -> float:
        """A step reads all weights, whatever the batch, as fast as the fastest of two ways reads them in one go.

        In one stream a thread, or in several as the engine reads one matrix, both in huge pages if Linux gives them.
        """
        del batch
        x, multiply = self._memory[:1].clone(), fastest(torch.bfloat16, "cpu")
        seconds = min(_seconds(self._memory.view(torch.float32).sum), _seconds(lambda: multiply(x, self._memory)))
        return steps * self._weight_bytes / (self._memory.nbytes / seconds)

    def prefill(self, tokens: int) -> float:
        """Two operations for each weight and token, in the fastest product of bfloat16 or float32, both exact enough.

        That is the library's or the engine's own.
        """
        operations = 2 * (self._weight_bytes / 2) * tokens
        bf16, fp32 = torch.bfloat16, torch.float32
        return operations / max(_rate(linear, bf16), _rate(linear, fp32), _rate(fastest(bf16, "cpu"), bf16))


def _rate(multiply: Multiply, dtype: torch.dtype) -> float:
    """Floating point operations per second of a linear map."""
    x, weight = torch.ones(_ROWS, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _ROWS * _SIDE**2 / _seconds(lambda: multiply(x, weight))


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    work()
    return min(_once(work) for _ in range(_TIMES))


def _once(work: Callable[[], torch.Tensor]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
