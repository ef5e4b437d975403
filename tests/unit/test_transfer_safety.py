"""Decoder's receiver and prefiller's sender over a network that reorders, fails, drops and outlives its nodes.

Whatever happens in whatever order: no page and no context slot is given away while a write can land in it, an arrival
means the right bytes of the right request, counts of two generations never mix, and every request has a way out.
"""

import itertools
import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kvferry_decoder.receiver import Receiver, Transfer, TransferState
from kvferry_decoder.slots import SlotPool
from kvferry_engine.allocator import PageAllocator
from kvferry_engine.context_slots import ContextSlots
from kvferry_fabric import EventKind
from kvferry_fabric.in_memory import MemoryEngine, Network, Write
from kvferry_prefiller.contexts import Contexts
from kvferry_prefiller.request import Request
from kvferry_prefiller.scheduler import Chunk
from kvferry_prefiller.sender import Sender
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRef, Peer
from kvferry_proto.shards import plan
from kvferry_proto.to_prefiller import Prefill

LAYOUT = KVLayout(model="m", dtype="float32", layers=2, kv_heads=2, head_dim=2, page_size=1, ranks=2)
RANKS = LAYOUT.ranks
PAGE, LAYERS, PAGES, SOURCE_PAGES = LAYOUT.page_bytes, LAYOUT.layers, 12, 4096
PIECES = plan(LAYOUT, LAYOUT)
SLOTS, STATE = 3, 4
"""Transfer slots of the decoder, and numbers in a hidden state: as many bytes as a mark."""


def mark(serial: int, rank: int, layer: int, index: int) -> bytes:
    """What page `index` of a request holds in a layer on a rank."""
    return struct.pack("<IIII", serial, rank, layer, index)


def state_of(serial: int) -> torch.Tensor:
    """The hidden state that belongs to a request."""
    return torch.frombuffer(bytearray(mark(serial, RANKS, LAYERS, 0)), dtype=torch.float32)


def register(engine: MemoryEngine, memory: np.ndarray) -> list[Any]:
    """Register each rank's part of `memory`."""
    return [engine.register(memoryview(of_rank).cast("B")) for of_rank in memory]


class Prefiller:
    """A prefiller's sending half; `compute` is one layer of its forward pass."""

    def __init__(self, network: Network, number: int) -> None:
        self.peer = Peer(ref=NodeRef(f"prefiller{number}", number), endpoint="tcp://127.0.0.1:1")
        self.engine = MemoryEngine(network, incarnation=number)
        self.memory = np.zeros((RANKS, LAYERS, SOURCE_PAGES, PAGE), np.uint8)
        pool = SimpleNamespace(layer_stride=SOURCE_PAGES * PAGE, page_stride=PAGE)
        self.counter = self.engine.new_counter()
        self.sender = Sender(
            SimpleNamespace(
                fabric=self.engine, layout=LAYOUT, pool=pool, counter=self.counter,
                register=lambda: register(self.engine, self.memory),
            ),
            Contexts(self.engine, ContextSlots(SOURCE_PAGES, STATE, torch.float32), SOURCE_PAGES),
        )  # fmt: skip
        self.used = 0
        self.chunks: list[Chunk] = []
        self.layer = 0


@dataclass(eq=False)
class Job:
    """A request as the test sees it: both halves."""

    serial: int
    prefiller: Prefiller
    transfer: Transfer
    pages: list[int]
    request: Request
    stopping: bool = False
    confirmed: bool = False
    running: bool = False
    """Its pages have come, and it uses them."""
    words: list[str] = field(default_factory=list)
    """Messages on their way between the two nodes; they come in any order."""


class World:
    def __init__(self) -> None:
        self.network = Network(automatic=False)
        self.decoder = MemoryEngine(self.network, incarnation=1)
        self.memory = np.zeros((RANKS, LAYERS, PAGES, PAGE), np.uint8)
        self.allocator = PageAllocator(PAGES)
        self.contexts = ContextSlots(SLOTS, STATE, torch.float32)
        self.receiver = Receiver(
            self.decoder,
            lambda: register(self.decoder, self.memory),
            self.allocator,
            SlotPool(SLOTS),
            lambda: self.decoder.register(self.contexts.buffer),
        )
        self.serial = 0
        self.jobs: list[Job] = []
        self.prefillers = [Prefiller(self.network, number) for number in (1, 2)]
        self.gone: list[Prefiller] = []

    # --- requests ---

    def start(self, number) -> None:
        which, pages = number % 2, 1 + number // 2 % 6
        if not self.receiver.can_expect() or not self.allocator.can_allocate(pages):
            return
        prefiller = self.prefillers[which]
        held = self.allocator.allocate(pages)
        transfer = self.receiver.expect("r", prefiller.peer, pages * LAYERS * len(PIECES) + 1)
        memory = [region.descriptor for region in transfer.key.regions]
        order = Prefill(
            request_id="r", tokens=Int32s(range(pages)), pages=Int32s(held), slot=transfer.slot.number,
            generation=transfer.slot.generation, layout=LAYOUT, memory=memory,
            context=transfer.key.context.descriptor,
        )  # fmt: skip
        request = Request(order, SimpleNamespace(sender=NodeRef("d", 1)), PIECES)
        request.pages = list(range(prefiller.used, prefiller.used + pages))
        prefiller.used += pages
        prefiller.sender.connect(request)
        self.serial += 1
        self.jobs.append(Job(self.serial, prefiller, transfer, held, request))

    def compute(self, number) -> None:
        prefiller, most = self.prefillers[number % 2], 1 + number // 2 % 4
        if not prefiller.chunks:
            self.begin_pass(prefiller, most)
        self.finish_layer(prefiller)

    def begin_pass(self, prefiller: Prefiller, most: int) -> None:
        for job in self.jobs_of(prefiller):
            if job.request.remaining and not job.stopping:
                chunk = Chunk(job.request, job.request.computed, min(most, job.request.remaining))
                prefiller.sender.register(chunk, prefiller.counter.value + 1)
                prefiller.chunks.append(chunk)
        prefiller.layer = 0

    def finish_layer(self, prefiller: Prefiller) -> None:
        if not prefiller.chunks:
            return
        for chunk in prefiller.chunks:
            serial = next(job.serial for job in self.jobs if job.request is chunk.request)
            for index in range(chunk.start, chunk.end):
                for rank in range(RANKS):
                    page = prefiller.memory[rank, prefiller.layer, chunk.request.pages[index]]
                    page[:] = np.frombuffer(mark(serial, rank, prefiller.layer, index), np.uint8)
        prefiller.counter.bump()
        prefiller.layer += 1
        if prefiller.layer == LAYERS:
            for chunk in prefiller.chunks:
                chunk.request.computed = chunk.end
                if chunk.last:
                    self.send_context(prefiller, chunk.request)
            prefiller.chunks = []

    def send_context(self, prefiller: Prefiller, request: Request) -> None:
        job = next(job for job in self.jobs if job.request is request)
        prefiller.sender.contexts.put(request.context_slot, state_of(job.serial))
        if not job.stopping:
            prefiller.sender.send_context(request)

    def cancel(self, number) -> None:
        live = [job for job in self.jobs if job.transfer.state is TransferState.EXPECTING]
        if live:
            self.abandon(live[number % len(live)])

    def finish(self, number) -> None:
        running = [job for job in self.jobs if job.running]
        if running:
            job = running[number % len(running)]
            job.running = False
            self.allocator.free(job.pages)

    # --- the network ---

    def pick(self, number: int) -> Write | None:
        flying = self.network.flying
        return flying[number % len(flying)] if flying else None

    def complete(self, number) -> None:
        for step in range(1 + number % 4):
            if write := self.pick(number // (step + 1)):
                self.network.complete(write)

    def land(self, number) -> None:
        if write := self.pick(number):
            self.network.land(write)

    def fail(self, number) -> None:
        if write := self.pick(number):
            self.network.fail(write)

    def drop(self, number) -> None:
        if write := self.pick(number):
            self.network.drop(write)

    def lose_prefiller(self, choice) -> None:
        """Its lease is over. It may be dead, or only cut off, and then its writes still come."""
        lost, dead = self.prefillers[choice % 2], choice // 2 % 2
        self.prefillers[choice % 2] = Prefiller(self.network, 10 + len(self.gone))
        self.gone.append(lost)
        if dead:
            self.network.lose(lost.engine.address)
        jobs = self.jobs_of(lost)
        for job in jobs:
            if job.transfer.state is TransferState.EXPECTING:
                self.abandon(job)
        self.receiver.revoke([job.transfer for job in jobs if job.transfer.awaits_confirmation])

    # --- the nodes ---

    def nodes_look(self, _number) -> None:
        self.decoder_looks()
        self.prefillers_look()

    def decoder_looks(self) -> None:
        for event in self.decoder.poll():
            assert event.kind is EventKind.ARRIVED, event
            transfer = self.receiver.find(event.slot, event.generation)
            job = next(job for job in self.jobs if job.transfer is transfer)
            for rank, layer, (index, page) in itertools.product(range(RANKS), range(LAYERS), enumerate(job.pages)):
                assert self.memory[rank, layer, page].tobytes() == mark(job.serial, rank, layer, index)
            assert torch.equal(self.contexts.take(event.slot).view(torch.int32), state_of(job.serial).view(torch.int32))
            self.receiver.arrived(transfer)
            job.running = True

    def prefillers_look(self) -> None:
        for prefiller in [*self.prefillers, *self.gone]:
            for event in prefiller.engine.poll():
                request = prefiller.sender.ended(event.transfer)
                job = next(job for job in self.jobs if job.request is request)
                if event.kind is EventKind.FAILED:
                    self.stop(job)
                    job.words.append("failed")
                self.confirm_if_quiet(job)

    def deliver_words(self, number) -> None:
        for pick in (number % 7, number % 5, number % 3):
            if talking := [job for job in self.jobs if job.words]:
                job = talking[pick % len(talking)]
                self.hear(job, job.words.pop(pick % len(job.words)))

    def hear(self, job: Job, word: str) -> None:
        if word == "cancel":
            self.stop(job)
            self.confirm_if_quiet(job)
        if word == "failed" and job.transfer.state is TransferState.EXPECTING:
            self.abandon(job)
        if word == "confirmed" and (transfer := self.receiver.find(*job.transfer.slot)) is not None:
            self.receiver.confirm(transfer)

    def stop(self, job: Job) -> None:
        job.stopping = True
        job.prefiller.sender.cancel(job.request)

    def confirm_if_quiet(self, job: Job) -> None:
        in_pass = any(chunk.request is job.request for chunk in job.prefiller.chunks)
        if job.stopping and not job.request.transfers and not in_pass and not job.confirmed:
            job.confirmed = True
            job.words.append("confirmed")

    def abandon(self, job: Job) -> None:
        self.receiver.abandon(job.transfer, job.pages)
        job.words.append("cancel")

    def jobs_of(self, prefiller: Prefiller) -> list[Job]:
        return [job for job in self.jobs if job.prefiller is prefiller]

    # --- what must hold ---

    def no_page_is_given_away_under_a_write(self) -> None:
        holders = {
            page: job
            for job in self.jobs
            for page in job.pages
            if job.running or job.transfer.state in {TransferState.EXPECTING, TransferState.QUARANTINED}
        }
        for write in self.network.flying:
            key = write.transfer.plan.remote.domains[0].key
            if write.landed or self.decoder.region_of(key) is None:
                continue
            slot = write.transfer.plan.slot, write.transfer.plan.generation
            if write.transfer.plan.remote.length == len(self.contexts.buffer):
                self.the_slot_is_still_its_own(write, slot)
                continue
            for offset, _ in write.pieces:
                holder = holders.get(offset // PAGE % PAGES)
                assert holder is not None, "a write can land in a page that is free"
                assert tuple(holder.transfer.slot) == slot, "a write can land in another request's page"
                assert not holder.running, "a write can land in a page that is in use"

    def the_slot_is_still_its_own(self, write: Write, slot: tuple[int, int]) -> None:
        [(offset, data)] = write.pieces
        assert (offset, len(data)) == (self.contexts.offset(slot[0]), self.contexts.row_bytes)
        assert any(tuple(transfer.slot) == slot for transfer in self.receiver.transfers)

    def the_book_of_pages_adds_up(self) -> None:
        book = self.allocator
        held = sum(len(j.pages) for j in self.jobs if j.running or j.transfer.state is TransferState.EXPECTING)
        assert book.held_pages == held
        assert book.free_pages + book.held_pages + book.quarantined_pages == PAGES

    def everything_ends(self) -> None:
        """Cancel all, let the network deliver what it has, lose whoever waits for a dropped write: nothing is held."""
        self.decoder_looks()
        for job in self.jobs:
            if job.transfer.state is TransferState.EXPECTING:
                self.abandon(job)
        for _ in range(4):
            self.settle()
        for which, prefiller in enumerate(self.prefillers):
            awaited = any(job.transfer.awaits_confirmation for job in self.jobs_of(prefiller))
            if awaited or prefiller.engine.stats().active_transfers:  # a write may be dropped when it has landed
                self.lose_prefiller(which + 2)
        for job in self.jobs:
            if job.running:
                self.allocator.free(job.pages)
        self.jobs = [job for job in self.jobs if job.prefiller not in self.gone]
        assert self.receiver.transfers == []
        assert (self.allocator.free_pages, self.receiver.slots.held) == (PAGES, 0)
        stats = self.decoder.stats()
        assert (stats.armed_slots, stats.regions) == (0, RANKS + 1)
        assert not any(prefiller.engine.stats().active_transfers for prefiller in self.prefillers)
        self.drop_the_gone()

    def settle(self) -> None:
        """Passes end, the network delivers, and every message is heard."""
        for prefiller in self.prefillers:
            while prefiller.chunks:
                self.finish_layer(prefiller)
        self.network.run(seed=self.serial)
        self.prefillers_look()
        for job in self.jobs:
            self.confirm_if_quiet(job)
            while job.words:
                self.hear(job, job.words.pop())

    def drop_the_gone(self) -> None:
        for prefiller in self.gone:
            prefiller.engine.close()
        self.jobs, self.gone = [], []

    def close(self) -> None:
        for engine in list(self.network.engines.values()):
            engine.close()


# How often each happens, out of all.
ACTIONS = {
    "start": 6, "compute": 8, "complete": 8, "land": 4, "fail": 1, "drop": 1, "cancel": 2, "finish": 3, "nodes_look": 6,
    "deliver_words": 6, "lose_prefiller": 1,
}  # fmt: skip
# No shrinking: of a hundred actions it takes longer than a test may.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
ACTION = st.tuples(
    st.sampled_from([name for name, often in ACTIONS.items() for _ in range(often)]), st.integers(0, 999)
)


@settings(max_examples=100, deadline=None, phases=PHASES)
@given(actions=st.lists(ACTION, min_size=20, max_size=120))
def test_whatever_happens_no_page_is_given_away_under_a_write_and_everything_ends(actions) -> None:
    world = World()
    for name, number in actions:
        getattr(world, name)(number)
        world.no_page_is_given_away_under_a_write()
        world.the_book_of_pages_adds_up()
    world.everything_ends()
    world.close()
