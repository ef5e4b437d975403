"""The work that every system does: scattered pages of one size, in batches, a few of them in flight."""

import mmap
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

SEED = 11
PATIENCE = 120.0
NAP = 2e-5
"""Seconds between two looks of a side that has to poll: what the other side gets of a shared core."""

Pages = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Work:
    """What a round moves: `pages` pages of `page` bytes, `batch` to a transfer, `window` transfers in flight."""

    page: int
    pages: int
    batch: int
    window: int

    @property
    def size(self) -> int:
        return self.page * self.pages

    @property
    def batches(self) -> int:
        return self.pages // self.batch

    def order(self, side: str) -> Pages:
        """Page numbers of one side, "source" or "target", in the order in which they travel: a random permutation."""
        random = np.random.default_rng([SEED, side == "target"])
        return random.permutation(self.pages).astype(np.int32)

    def part(self, batch: int) -> slice:
        """Which of them a batch has."""
        return slice(batch * self.batch, (batch + 1) * self.batch)


class Memory:
    """Page-aligned memory of a process, touched. The sender's is random, the same random bytes in every process."""

    def __init__(self, size: int, buffer: memoryview | None = None) -> None:
        """`buffer`: memory to take instead of private memory of its own."""
        self._buffer = buffer or mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self._buffer, dtype=np.uint8)
        self.bytes[:] = 1
        self.address = int(self.bytes.ctypes.data)

    def fill(self) -> "Memory":
        random = np.random.default_rng(SEED)
        self.bytes.view(np.int64)[:] = random.integers(0, 1 << 63, self.bytes.size // 8, dtype=np.int64)
        return self


def wrong_pages(work: Work, memory: Memory) -> int:
    """Number of pages of a receiver that differ, in any byte, from what they should hold."""
    want = Memory(work.size).fill().bytes.reshape(work.pages, work.page)[work.order("source")]
    got = memory.bytes.reshape(work.pages, work.page)[work.order("target")]
    return int((got != want).any(axis=1).sum())


class Receiver(Protocol):
    """One system's receiving side, in a process of its own."""

    card: Any
    """What its sender must know of it; picklable."""

    def meet(self, sender: Any) -> None: ...  # noqa: ANN401 - that system's own card
    def arm(self, round_number: int) -> None: ...
    def wait(self, batches: int) -> int:
        """Wait until so many batches have been signalled; return when that was, monotonic ns."""
        ...


class Sender(Protocol):
    """One system's sending side."""

    card: Any

    def meet(self, receiver: Any) -> None: ...  # noqa: ANN401 - that system's own card
    def post(self, batch: int, round_number: int) -> Any: ...  # noqa: ANN401 - that system's own handle
    def finish(self, handle: Any) -> None: ...  # noqa: ANN401 - the same
    def progress(self) -> None:
        """Do what this side must still do until the receiver has everything."""
        ...


class TransferFailedError(RuntimeError):
    """A system refused or lost a transfer."""
