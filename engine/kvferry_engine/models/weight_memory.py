"""Memory for weights on CPUs: blocks of zeros that the kernel is asked to back with huge pages.

A decode step reads all weights once, from the first to the last. In pages of 4 KiB the processor looks up an address
every 64 cache lines, and its own reading ahead ends there.
"""

import math
import mmap

import torch

BLOCK = 64 << 20
"""Bytes of a block, but for a tensor that is larger."""
SMALL = 64 << 10
"""Smaller tensors are torch's, each by itself."""
HUGE = 2 << 20
LINE = 64


class WeightMemory:
    """Tensors one behind the other; a block lives as long as the last tensor in it."""

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor of zeros, dense and on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL:
            return torch.zeros(shape, dtype=dtype)
        if self._block is None or self._used + size > len(self._block):
            self._block, self._used = _block(max(size, BLOCK)), 0
        value = self._block[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // LINE) * LINE
        return value


def _block(size: int) -> torch.Tensor:
    """Zeros, uint8 [size], from a multiple of a huge page on."""
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    return whole[first : first + size]
