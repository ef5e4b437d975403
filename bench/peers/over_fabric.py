"""Ours: a batch is a chunk without a counter, its receiver a slot that is armed for the batch's pages."""

import select
import time

from kvferry_fabric import ChunkSchedule, Event, EventKind, Runs, SharedMemory, Transfer, TransferEngine, runs
from kvferry_proto.memory import MemoryDescriptor

from peers.work import PATIENCE, Memory, TransferFailedError, Work

GENERATIONS = 1024


def _events(engine: TransferEngine) -> list[Event]:
    end = time.monotonic() + PATIENCE
    while not (events := engine.poll()):
        if time.monotonic() > end:
            raise TimeoutError("no event of the fabric")
        select.select([engine.event_fd], [], [], 1)
    return events


class FabricReceiver:
    """Arms a slot for every batch before a round."""

    def __init__(self, work: Work, provider: str) -> None:
        self.work = work
        self.engine = TransferEngine(provider, incarnation=2)
        # As a decoder's pool: what peers on the host map with provider local, memory like any other without.
        self.shared = SharedMemory.create(work.size, "kvferry-bench")
        self.memory = Memory(work.size, self.shared.buffer)
        self.region = self.engine.register(self.shared)
        self.card = self.region.descriptor

    def meet(self, sender: object) -> None:
        """There is nothing to know of a sender."""

    def arm(self, round_number: int) -> None:
        for slot in range(self.work.batches):
            if round_number:
                self.engine.disarm(slot, (round_number - 1) % GENERATIONS)
            self.engine.expect(slot, round_number % GENERATIONS, self.work.batch)

    def wait(self, batches: int) -> int:
        arrived: list[Event] = []
        while len(arrived) < batches:
            arrived += _events(self.engine)
        if any(event.kind is not EventKind.ARRIVED for event in arrived):
            raise TransferFailedError(str(arrived))
        return max(event.last_arrival_ns for event in arrived)


class FabricSender:
    """Has merged each batch's pages into runs beforehand, as a page table is known before its bytes are."""

    def __init__(self, work: Work, provider: str) -> None:
        self.work = work
        self.engine = TransferEngine(provider, incarnation=1)
        self.memory = Memory(work.size).fill()
        self.region = self.engine.register(memoryview(self.memory.bytes))
        source, target = work.order("source"), work.order("target")
        self.runs = [runs(source[work.part(i)], target[work.part(i)]) for i in range(work.batches)]
        self.ended: set[Transfer | None] = set()
        self.card = None

    def meet(self, receiver: MemoryDescriptor) -> None:
        self.remote, self.peer = receiver, self.engine.connect(receiver.addresses)

    def _chunk(self, table: Runs, slot: int, generation: int) -> ChunkSchedule:
        page = self.work.page
        return ChunkSchedule(
            counter=None, first_value=0, layers=1, region=self.region, peer=self.peer, remote=self.remote, slot=slot,
            generation=generation, source_layer_stride=0, destination_layer_stride=0, source_page_stride=page,
            destination_page_stride=page, length=page, runs=table,
        )  # fmt: skip

    def post(self, batch: int, round_number: int) -> Transfer:
        return self.engine.schedule_layers(self._chunk(self.runs[batch], batch, round_number % GENERATIONS))

    def finish(self, handle: Transfer) -> None:
        while handle not in self.ended:
            for event in _events(self.engine):
                if event.kind is not EventKind.DONE:
                    raise TransferFailedError(event.text)
                self.ended.add(event.transfer)
        self.ended.remove(handle)

    def progress(self) -> None:
        """The fabric's thread does it."""
