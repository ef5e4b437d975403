"""The layer counter of a node that computes on a GPU: the GPU's stream raises it, the fabric's thread reads it.

A forward pass only tells the GPU what to compute, so a counter that the host raised would run ahead of the keys and
values. This one is a word of pinned host memory. It is raised by an addition and not by writing a number, so that a
CUDA graph that has captured it counts on with every replay.
"""

import mmap

import torch
from kvferry_fabric import LayerCounter, TransferEngine

from kvferry_engine.cuda_driver import call, current, load
from kvferry_engine.cuda_memory import MappedMemory

_WORD = 8
_FENCE_AT = 128
"""Bytes from the counter's word to the one that fences write to: in another cache line."""


class DeviceCounter:
    """Owns the word; `counter` is what schedules follow."""

    def __init__(self, fabric: TransferEngine, device: str) -> None:
        """Raises CudaError or FabricError."""
        self._driver = load()
        self._device = device
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._mapped = MappedMemory(memoryview(self._memory), device)
        self._word = self._mapped.tensor[:_WORD].view(torch.int64)
        self.counter: LayerCounter = fabric.new_counter(memoryview(self._memory)[:_WORD])

    def bump(self) -> None:
        """Have the current stream add one, once all that it was given before is done and seen by host and NICs."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with current(self._device):
            # By default the driver puts a fence of the whole system before such a write; a kernel has none by itself.
            call(self._driver.cuStreamWriteValue64, stream, self._mapped.pointer + _FENCE_AT, 1, 0)
        self._word.add_(1)

    def close(self) -> None:
        """Unpin the word; the fabric, which reads it, is closed first."""
        self._mapped.close()
