"""A prefiller under everything that can end a request, in any order: every page, transfer and connection comes back.

The service is the real one, with scheduler, prefix cache and sender. Decoders, the forward pass and the fabric are the
test's, which decides what each says, and when.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kvferry_engine.context_slots import ContextSlots
from kvferry_engine.prefix_cache import PrefixCache
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_fabric import Event, EventKind, FabricError
from kvferry_node.errors import PeerGone
from kvferry_prefiller.service import PrefillerService
from kvferry_prefiller.settings import PrefillerSettings
from kvferry_proto.codec import MAX_FRAME_BYTES, encode
from kvferry_proto.errors import ErrorCode
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.memory import DomainMemory, MemoryDescriptor
from kvferry_proto.nodes import NodeRef
from kvferry_proto.timeline import now
from kvferry_proto.to_prefiller import CancelPrefill, Prefill
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

LAYOUT = KVLayout(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=4, page_size=4)
PAGES, DESTINATION, RUNNING = 16, 64, 4
LENGTHS = (1, 3, 4, 5, 8, 9, 16, 31, 60)


@dataclass(frozen=True, order=True)
class Handle:
    """A transfer, in the order in which they began."""

    number: int
    fabric: "Fabric" = field(compare=False, repr=False)

    def cancel(self):
        assert self in self.fabric.reads
        self.fabric.cancelled.add(self)


class Fabric:
    """Transfers under way, each with the source pages that it reads."""

    provider = "tcp"

    def __init__(self):
        self.reads = {}
        self.cancelled = set()
        self.peers = 0
        self.made = 0
        self.refuses = False
        self.forgotten = []

    def attach(self, _loop, _on_event):
        pass

    def register(self, _memory):
        return "region"

    def connect(self, _addresses, _seat=""):
        self._refuse()
        self.peers += 1
        return SimpleNamespace(close=self._disconnect)

    def forget(self, addresses, seat):
        self.forgotten.append((addresses, seat))

    def _disconnect(self):
        self.peers -= 1

    def schedule_layers(self, schedule):
        return self.write_pages(schedule)

    def write_pages(self, pages):
        runs = pages.runs.tolist()
        return self._begin([page for source, _, count in runs for page in range(source, source + count)])

    def write(self, **_):
        return self._begin([])

    def _begin(self, pages):
        self._refuse()
        self.made += 1
        handle = Handle(self.made, self)
        self.reads[handle] = pages
        return handle

    def _refuse(self):
        if self.refuses:
            text = "refused"
            raise FabricError(text)

    def stats(self):
        return SimpleNamespace(active_transfers=len(self.reads), in_flight_writes=0, peers=self.peers)


@dataclass(eq=False)
class Decoder:
    """Where words go: the last one about each order, by slot and generation."""

    sender: NodeRef
    key: bytes = b"d"
    gone: bool = False
    last_words: Counter = field(default_factory=Counter)

    def reply(self, message):
        if self.gone:
            text = "gone"
            raise PeerGone(text)
        encode(NodeRef("p", 1), message)
        self.last_words[message.request_id, type(message).__name__] += 1


class World:
    """A prefiller, and everything around it."""

    def __init__(self):
        self.fabric = Fabric()
        self.allocator = PrefixCache(PAGES)
        self.step = None
        self.inputs = []
        self.checks = []
        self.surplus = 0
        """Checksums beyond those of the pages."""
        own = PrefillerSettings(model="none", max_running=RUNNING, max_waiting=6, chunk_size=8, overtake_seconds=1.0)
        worker = SimpleNamespace(
            fabric=self.fabric, allocator=self.allocator, layout=LAYOUT, settings=own, register=lambda: ["region"],
            config=SimpleNamespace(vocab_size=1000, max_positions=100), compute=self.compute, checksums=self.checksums,
            counter=SimpleNamespace(value=0), pool=SimpleNamespace(layer_stride=1, page_stride=1), on_layer=None,
            model=SimpleNamespace(drafts=True), new_context_slots=lambda count: ContextSlots(count, 4, torch.float32),
        )  # fmt: skip
        metrics = WorkerMetrics(CollectorRegistry(), lambda: None)
        self.service = PrefillerService(worker, own, NodeRef("p", 1), metrics)
        self.decoders = [Decoder(NodeRef(f"d{number}", 1)) for number in range(2)]
        self.orders = []
        self.running = asyncio.ensure_future(self.service.run())

    # --- what the service needs ---

    async def compute(self, work):
        self.step, self.inputs = asyncio.get_running_loop().create_future(), work.args[0]
        try:
            if not await self.step:
                text = "out of memory"
                raise RuntimeError(text)
        finally:
            self.step, self.inputs = None, []

    async def checksums(self, pages, _places):
        self.checks.append((list(pages), done := asyncio.get_running_loop().create_future()))
        await done
        return Int32s([7] * (len(pages) * LAYOUT.layers + self.surplus))

    # --- what happens ---

    def ask(self, number):
        decoder = self.decoders[number % 2]
        length = LENGTHS[number // 2 % len(LENGTHS)]
        pages = LAYOUT.pages_for(length)
        first = number // 18 % pages if number % 3 == 0 else 0
        remote = MemoryDescriptor(
            provider="tcp", length=DESTINATION * LAYOUT.layers * LAYOUT.page_bytes, incarnation=1,
            domains=(DomainMemory(address="a", base=0, key=1),),
        )  # fmt: skip
        order = Prefill(
            # Most prompts begin as another one did.
            request_id=f"r{len(self.orders)}", tokens=Int32s([100 + number // 36 % 2] * length), first_page=first,
            pages=Int32s(range(pages - first)), slot=0, generation=0, layout=LAYOUT, memory=[remote],
            checksums=number % 5 < 2, context=remote if number % 7 < 3 else None,
        )  # fmt: skip
        self.orders.append((decoder, order))
        self.service.on_message(decoder, order)

    def cancel(self, number):
        if self.orders:
            decoder, order = self.orders[-1 - number % min(8, len(self.orders))]
            self.service.on_message(decoder, CancelPrefill(request_id=order.request_id, slot=0, generation=0))

    def step_ends(self, number):
        if self.step is not None and not self.step.done():
            self.step.set_result(number % 9 != 0)

    def transfer_ends(self, number):
        """Some transfer ends; one whose pages are still computed into can't be done, but it can fail."""
        for _ in range(1 + number % 4):
            if self.fabric.reads:
                transfer = sorted(self.fabric.reads)[number % len(self.fabric.reads)]
                kind = EventKind.CANCELLED if transfer in self.fabric.cancelled else EventKind.DONE
                self.end(transfer, EventKind.FAILED if number % 7 == 0 else kind)

    def end(self, transfer, kind):
        del self.fabric.reads[transfer]
        self.fabric.cancelled.discard(transfer)
        self.service._on_event(Event(kind=kind, slot=0, generation=0, pages=1, transfer=transfer))

    def checked(self, number):
        if self.checks:
            done = self.checks.pop(number % len(self.checks))[1]
            if number % 5 == 4:
                done.set_exception(RuntimeError("the GPU is gone"))
            else:
                done.set_result(None)

    def lose_decoder(self, number):
        self.service.node_left(self.decoders[number % 2].sender)

    def stand_still(self, _number):
        self.service.stood_still(9.0)

    def trouble(self, number):
        if number % 2:
            self.fabric.refuses = not self.fabric.refuses
        else:
            decoder = self.decoders[number // 2 % 2]
            decoder.gone = not decoder.gone

    def grow_old(self, _number):
        for request in self.service.scheduler.requests:
            request.timeline.received = now() - 5_000_000_000

    # --- what must hold ---

    async def settle(self):
        for _ in range(6):
            await asyncio.sleep(0)
        assert not self.running.done(), self.running.exception()

    def check(self):
        book, service = self.allocator, self.service
        book.check()
        mine = Counter(page for each in service.scheduler.requests for page in each.pages)
        assert book.held_pages == len(mine)
        assert all(book._references[page] == count for page, count in mine.items())
        assert all(page in mine for pages in self.fabric.reads.values() for page in pages), "sent from a free page"
        assert all(page in mine for pages, _ in self.checks for page in pages), "checked, and free"
        for piece in self.inputs:
            written = piece.pages[piece.start // 4 : -(-(piece.start + len(piece.tokens)) // 4)]
            assert all(mine[page] == 1 and page not in book._hash_of for page in written), "written to, and shared"
        assert self.fabric.peers == len(list(service.scheduler.requests))
        assert service.under_way() or not any(service.held().values()), "the idle check would sound"

    async def everything_ends(self):
        self.fabric.refuses = False
        for decoder in self.decoders:
            decoder.gone = False
        self.service.fail_rest(ErrorCode.DRAINING, "the test is over")
        for _ in range(6):
            self.step_ends(1)
            while self.checks:
                self.checked(0)
            for transfer in sorted(self.fabric.reads):
                self.end(transfer, EventKind.CANCELLED)
            await self.settle()
        held = {name: count for name, count in self.service.held().items() if count}
        assert not held, held
        assert self.allocator.free_pages == PAGES
        assert len(self.service._sender.contexts._free) == RUNNING
        self.check()

    async def close(self):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


ACTIONS = {
    "ask": 8, "step_ends": 10, "transfer_ends": 8, "cancel": 3, "checked": 4, "lose_decoder": 1, "stand_still": 1,
    "trouble": 1, "grow_old": 1,
}  # fmt: skip
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
ACTION = st.tuples(
    st.sampled_from([name for name, often in ACTIONS.items() for _ in range(often)]), st.integers(0, 9999)
)


@settings(max_examples=80, deadline=None, phases=PHASES)
@given(actions=st.lists(ACTION, min_size=20, max_size=100))
def test_however_requests_end_everything_comes_back(actions):
    with capture_logs():
        asyncio.run(play(actions))


async def play(actions):
    world = World()
    try:
        for name, number in actions:
            getattr(world, name)(number)
            world.check()
            await world.settle()
            world.check()
        await world.everything_ends()
    finally:
        await world.close()


def test_checksums_that_no_message_holds_fail_the_prefill_instead_of_never_coming():
    asyncio.run(play_with_too_many_checksums())


async def play_with_too_many_checksums():
    world = World()
    try:
        world.surplus = MAX_FRAME_BYTES
        world.ask(5)
        await world.settle()
        world.step_ends(1)
        await world.settle()
        for transfer in sorted(world.fabric.reads):
            world.end(transfer, EventKind.DONE)
        await world.settle()
        world.checked(0)
        await world.settle()
        assert set(world.decoders[1].last_words) == {("r0", "PrefillFailed")}
        await world.everything_ends()
    finally:
        await world.close()
