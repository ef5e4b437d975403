"""Context slots: rows of registered memory for the hidden states that travel beside the KV.

The drafting layer goes on from the hidden state of the last position that was prefilled: the one thing that a decoder
needs of a prefill and that is in no page. A row is a slot's: whoever holds the slot holds the row.
"""

import torch
from kvferry_fabric import SharedMemory

from kvferry_engine.checksums import checksum


class ContextSlots:
    """Preallocated rows, one hidden state each; made once, before anything is registered."""

    def __init__(self, count: int, size: int, dtype: torch.dtype) -> None:
        """Make `count` rows of `size` numbers."""
        self.row_bytes = size * dtype.itemsize
        self._memory = SharedMemory.create(count * self.row_bytes, "kvferry-context")
        self._rows = torch.frombuffer(self._memory.buffer, dtype=dtype)[: count * size].view(count, size)

    @property
    def buffer(self) -> memoryview:
        """All rows, to be registered; they must outlive the registration."""
        return self._memory.buffer

    @property
    def shared(self) -> SharedMemory:
        """All rows, to be registered so that peers on this host can write to them."""
        return self._memory

    def offset(self, slot: int) -> int:
        """Bytes before a slot's row."""
        return slot * self.row_bytes

    def put(self, slot: int, state: torch.Tensor) -> None:
        """Write a slot's row, [E]."""
        self._rows[slot].copy_(state)

    def take(self, slot: int) -> torch.Tensor:
        """Copy a slot's row, [E]."""
        return self._rows[slot].clone()

    def close(self) -> None:
        """Give the memory back; deregister it first."""
        self._rows = self._rows[:0].clone()
        self._memory.close()


def state_checksum(state: torch.Tensor) -> int:
    """xxh32 of a hidden state's bytes, as a signed number."""
    return checksum(state.contiguous().view(torch.uint8).numpy().tobytes())
