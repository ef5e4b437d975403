"""Mooncake over tcp: asynchronous batches; its receiver is told through the pipe when the sender has seen all done."""

from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

from peers.work import Memory, TransferFailedError, Work

HOST = "127.0.0.1"


def _engine(memory: Memory, size: int) -> Any:  # noqa: ANN401 - Mooncake has no types
    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(memory.address, size):
        raise TransferFailedError("Mooncake's engine does not open")
    return engine


class MooncakeReceiver:
    """Memory to write into; it has no wait(): it hears of nothing by itself."""

    def __init__(self, work: Work, _: str) -> None:
        self.memory = Memory(work.size)
        self.engine = _engine(self.memory, work.size)
        self.card = (f"{HOST}:{self.engine.get_rpc_port()}", self.memory.address)

    def meet(self, sender: object) -> None:
        """There is nothing to know of a sender."""

    def arm(self, round_number: int) -> None:
        """There is nothing to arm."""


class MooncakeSender:
    """Has each batch's addresses as lists beforehand."""

    def __init__(self, work: Work, _: str) -> None:
        self.work = work
        self.memory = Memory(work.size).fill()
        self.engine = _engine(self.memory, work.size)
        self.card = None

    def meet(self, receiver: tuple[str, int]) -> None:
        self.peer, base = receiver
        self.mine = self._addresses("source", self.memory.address)
        self.theirs = self._addresses("target", base)
        self.lengths = [self.work.page] * self.work.batch

    def _addresses(self, side: str, base: int) -> list[list[int]]:
        addresses = base + self.work.order(side).astype(np.int64) * self.work.page
        return [addresses[self.work.part(i)].tolist() for i in range(self.work.batches)]

    def post(self, batch: int, _: int) -> int:
        return self.engine.batch_transfer_async_write(self.peer, self.mine[batch], self.theirs[batch], self.lengths)

    def finish(self, handle: int) -> None:
        if self.engine.get_batch_transfer_status([handle]):
            raise TransferFailedError("Mooncake says that a batch failed")

    def progress(self) -> None:
        """Its threads do it."""
