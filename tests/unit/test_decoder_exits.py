"""A decoder under everything that can end a request, in any order: every page, slot and memory key comes back.

The service is the real one, with scheduler, prefix cache, intake and receiver. Prefillers, the forward pass, the fabric
and the routers are the test's, which decides what each says, and when.
"""

import asyncio
import errno
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kvferry_decoder.receiver import TransferState
from kvferry_decoder.request import State
from kvferry_decoder.service import DecoderService
from kvferry_decoder.settings import DecoderSettings
from kvferry_decoder.step import Run
from kvferry_engine.grammar import GrammarError
from kvferry_engine.prefix_cache import PrefixCache
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_fabric import Event, EventKind, FabricError
from kvferry_node.errors import PeerGone
from kvferry_proto.errors import ErrorCode, RequestError
from kvferry_proto.errors import Phase as RequestPhase
from kvferry_proto.grammar import Grammar
from kvferry_proto.hashing import block_hashes
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef, Peer
from kvferry_proto.page_table import PageEntry, Source, pack
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.timeline import PrefillTimeline
from kvferry_proto.to_decoder import Assign, Cancel, CancelConfirmed, PrefillFailed, PrefillReport
from kvferry_proto.to_prefiller import CancelPrefill, Prefill
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

LAYOUT = KVLayout(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=4, page_size=4)
PAGES, SLOTS, END = 14, 3, 2
MAX_CONTEXT = PAGES * LAYOUT.page_size
PEERS = [Peer(ref=NodeRef(f"p{i}", i + 1), endpoint=f"tcp://127.0.0.1:{i + 1}", layout=LAYOUT) for i in range(2)]
STRANGE = KVLayout(model="m", dtype="bfloat16", layers=2, kv_heads=1, head_dim=4, page_size=4)
PEERS.append(Peer(ref=NodeRef("other", 9), endpoint="tcp://127.0.0.1:9", layout=STRANGE))
LENGTHS = (1, 2, 4, 5, 8, 9, 17, 33)
CHECKSUM = 7
FORBIDDEN, LAST = 13, 14
"""Tokens that the test's grammar does not take, and that nothing may follow."""


class Fabric:
    """Slots as they are armed, and memory keys; a key may be refused to be closed for a while."""

    def __init__(self):
        self.armed = set()
        self.regions = 0
        self.copying = False
        self.full = False
        """Whether what is registered can't be registered once more."""

    def expect(self, slot, generation, _arrivals):
        assert (slot, generation) not in self.armed
        self.armed.add((slot, generation))

    def disarm(self, slot, generation):
        self.armed.discard((slot, generation))

    def register(self):
        if self.full and self.regions:
            text = "no memory may be locked any more"
            raise FabricError(text, errno.ENOMEM)
        self.regions += 1
        return [SimpleNamespace(descriptor=None, close=self._close)]

    def _close(self):
        if self.copying:
            text = "a sender copies"
            raise FabricError(text, errno.EAGAIN)
        self.regions -= 1

    def attach(self, _loop, _on_event):
        pass

    def stats(self):
        return SimpleNamespace(armed_slots=len(self.armed), active_transfers=0, in_flight_writes=0)


class Matcher:
    """A grammar that ends where the test says."""

    complete, failure = False, ""

    def takes(self, tokens):
        return len(tokens)

    def copy(self):
        return Matcher()

    def advance(self, tokens):
        if FORBIDDEN in tokens:
            text = "forbidden"
            raise GrammarError(text)
        self.complete = LAST in tokens


@dataclass(eq=False)
class Router:
    """Where answers go: what became of each request."""

    key: bytes = b"router"
    sender: NodeRef = field(default_factory=lambda: NodeRef("r", 1))
    gone: bool = False
    ends: Counter = field(default_factory=Counter)

    def reply(self, message):
        if self.gone:
            text = "gone"
            raise PeerGone(text)
        if type(message).__name__ in {"Finished", "Cancelled", "RequestFailed"}:
            self.ends[message.request_id] += 1


class World:
    """A decoder, and everything around it."""

    def __init__(self, *, verify):
        self.fabric = Fabric()
        self.allocator = PrefixCache(PAGES)
        self.step = None
        self.checks = []
        self.compiling = []
        own = DecoderSettings(
            model="none", max_running=4, max_waiting=8, prefill_budget=6, slots=SLOTS, local_prefill_tokens=3,
            verify_kv=verify, speculate="ngram", cancel_retry_seconds=0.001,
        )  # fmt: skip
        worker = SimpleNamespace(
            fabric=self.fabric, allocator=self.allocator, layout=LAYOUT, settings=own, register=self.fabric.register,
            config=SimpleNamespace(vocab_size=1000), max_context=MAX_CONTEXT, compute=self.compute,
            checksums=self.checksums,
        )  # fmt: skip
        metrics = WorkerMetrics(CollectorRegistry(), lambda: None)
        self.service = DecoderService(worker, own, NodeRef("d", 1), metrics, lambda _handler, _on_return: self)
        self.service._entrance._grammars._compiler.close()
        self.service._entrance._grammars._compiler = SimpleNamespace(compile=self.compile, close=lambda: None)
        self.service._loop._masker.close()
        self.service._loop._masker = SimpleNamespace(begin=lambda _: None, close=lambda: None)
        self.sent = []
        self.unreachable = False
        self.service.listen()
        self.router = Router()
        self.asked = []
        self.running = asyncio.ensure_future(self.service.run())

    # --- what the service needs ---

    async def compute(self, work):
        self.step = asyncio.get_running_loop().create_future()
        outcome = await self.step
        self.step = None
        if outcome is None:
            text = "out of memory"
            raise RuntimeError(text)
        inputs = work.args[1]
        return [outcome(drafts) for drafts in inputs.drafts]

    async def checksums(self, pages, _places):
        self.checks.append(done := asyncio.get_running_loop().create_future())
        await done
        return Int32s([CHECKSUM] * len(pages) * LAYOUT.layers)

    async def compile(self, _grammar, _ends):
        self.compiling.append(done := asyncio.get_running_loop().create_future())
        if await done:
            return Matcher()
        text = "too hard"
        raise GrammarError(text)

    def to(self, peer):
        return SimpleNamespace(send=lambda message: self._send(peer, message))

    def forget(self, _ref):
        pass

    def _send(self, peer, message):
        if self.unreachable:
            text = "full"
            raise PeerGone(text)
        self.sent.append((peer, message))

    # --- requests ---

    def ask(self, number):
        kind, number = number % 6, number // 6
        length = LENGTHS[number % len(LENGTHS)]
        # Two conversations: most prompts begin as another one did.
        tokens = [100 + number // 8 % 2] * length
        peer = None if kind in {0, 1} else PEERS[number % len(PEERS) if kind == 5 else kind % 2]
        grammar = Grammar.regex("x") if kind in {1, 4} else None
        answered = length // 2 if kind == 4 else 0
        if answered:
            tokens[-1] = (LAST, FORBIDDEN, 5)[number % 3]
        source = Source.LOCAL if peer is None else Source.PREFILLER
        hashes = block_hashes(tokens[:-1], LAYOUT.page_size, LAYOUT.model, "")
        hashes += [0] * (LAYOUT.pages_for(length - 1) - len(hashes))
        assign = Assign(
            request_id=f"r{len(self.asked)}", tokens=Int32s(tokens), stop_token_ids=[END], prefiller=peer,
            page_table=pack([PageEntry(each, source) for each in hashes]), grammar=grammar, answered=answered,
            sampling=SamplingParams(max_tokens=1 + number % 40),
        )  # fmt: skip
        self.asked.append(assign.request_id)
        self.service.on_message(self.router, assign)

    def cancel(self, number):
        if live := list(self.service._requests):
            self.service.on_message(self.router, Cancel(request_id=live[number % len(live)]))

    def compiled(self, number):
        if self.compiling:
            self.compiling.pop(number % len(self.compiling)).set_result(number % 4 != 0)

    def checked(self, number):
        if self.checks:
            done = self.checks.pop(number % len(self.checks))
            if number % 5 == 4:
                done.set_exception(RuntimeError("the GPU is gone"))
            else:
                done.set_result(None)

    def drop_router(self, number):
        if number % 8 == 0:
            self.service.node_left(self.router.sender)
        else:
            self.router.gone = not self.router.gone

    # --- steps ---

    async def steps(self, number):
        """Several steps; at most the last one ends badly."""
        for more in range(number % 5):
            self.step_ends(lambda drafts, more=more: Run([*drafts, 100 + (number + more) % 2], []))
            await self.settle()
        token = (END, FORBIDDEN, LAST, 100, 101, 5)[number % 6]
        self.step_ends(
            (
                None,
                lambda _: Run([-1], []),
                lambda _: Run([token], []),
                lambda drafts: Run([*drafts[:1], token], []),
                lambda drafts: Run([*drafts, token], []),
            )[number // 8 % 5 if number % 4 == 0 else 2 + number % 3]
        )

    def step_ends(self, outcome):
        if self.step is not None and not self.step.done():
            self.step.set_result(outcome)

    # --- prefillers ---

    def pick(self, number, kind):
        """One of the messages of a kind that were sent: half of the time one that somebody waits for the answer to."""
        found = [entry for entry in self.sent if isinstance(entry[1], kind)]
        awaited = [entry for entry in found if entry[1].request_id in self.service.intake._incoming]
        found = awaited if awaited and number % 2 else found
        return found[number // 2 % len(found)] if found else (None, None)

    def arrive(self, number):
        armed = sorted(self.fabric.armed)
        if armed:
            slot, generation = armed[number % len(armed)]
            self.service._on_event(Event(kind=EventKind.ARRIVED, slot=slot, generation=generation, pages=1))

    def say(self, number):
        """Any word of a prefiller about anything it was ever asked: late, twice, or never true any more."""
        peer, order = self.pick(number // 4, Prefill)
        if order is None:
            return
        names = {"request_id": order.request_id, "slot": order.slot, "generation": order.generation}
        match number % 4:
            case 0:
                error = RequestError(code=ErrorCode.INTERNAL, message="x", phase=RequestPhase.PREFILL, node=peer.ref.id)
                said = PrefillFailed(**names, error=error)
            case 1:
                said = CancelConfirmed(**names)
            case 2 | 3 if number % 7:
                right = len(order.pages) * LAYOUT.layers
                sums = Int32s([CHECKSUM] * right) if number % 5 else Int32s()
                said = PrefillReport(**names, timeline=PrefillTimeline(cached=4), checksums=sums)
            case _:
                reason = "stale" if number % 3 == 0 else "internal"
                said = Refused(reason=reason, detail="", about=order.request_id)
        self.hear(peer, said)

    def hear(self, peer, said):
        self.service._on_prefiller(SimpleNamespace(sender=peer.ref, peer=peer), said)

    def confirm(self, number):
        peer, asked = self.pick(number, CancelPrefill)
        if asked is not None:
            self.hear(peer, CancelConfirmed(request_id=asked.request_id, slot=asked.slot, generation=asked.generation))

    def lose_prefiller(self, number):
        self.service.node_left(PEERS[number % 2].ref)

    def break_connection(self, number):
        self.service._connection_broke(PEERS[number % 2].ref)

    def stand_still(self, _number):
        self.service.stood_still(9.0)

    def sweep(self, number):
        incoming = list(self.service.intake._incoming.values())
        if incoming and number % 5 == 0:
            incoming[number % len(incoming)].deadline = 0
        self.service._sweep(lambda ref: True)

    def trouble(self, number):
        match number % 3:
            case 0:
                self.unreachable = not self.unreachable
            case 1:
                self.fabric.copying = not self.fabric.copying
            case 2:
                self.fabric.full = not self.fabric.full

    # --- what must hold ---

    async def settle(self):
        for _ in range(6):
            await asyncio.sleep(0)
        assert not self.running.done(), self.running.exception()

    def check(self):
        book, service = self.allocator, self.service
        book.check()
        scheduler = service.scheduler
        live = list(scheduler.requests)
        compiling = [each for each in service._requests.values() if each.state is State.COMPILING]
        assert {each.id for each in (*live, *compiling)} == service._requests.keys()
        mine = Counter(page for each in (*live, *scheduler.leaving) for page in each.pages)
        assert book.held_pages == len(mine)
        assert all(book._references[page] == count for page, count in mine.items())
        quarantined = [t for t in service.receiver.transfers if t.state is TransferState.QUARANTINED]
        assert book.quarantined_pages == sum(len(each.quarantined_pages) for each in quarantined)
        assert len(self.fabric.armed) == len(service.receiver.transfers) - len(quarantined)
        load = service.load()
        assert load.running + load.waiting == sum(service.states().values()) == len(service._requests)
        assert service.under_way() or not any(service.held().values()), "the idle check would sound"
        assert max(self.router.ends.values(), default=0) <= 1, "a request has ended twice"

    async def everything_ends(self):
        """Nobody wants anything any more, and everyone answers: then nothing is held."""
        self.unreachable = self.fabric.copying = False
        self.service.fail_rest(ErrorCode.DRAINING, "the test is over")
        for number in range(6):
            self.service.intake.sweep(lambda ref: True)
            self.service._answers.sweep(lambda ref: False)
            while self.checks:
                self.checked(0)
            while self.compiling:
                self.compiled(number)
            self.step_ends(lambda _: Run([END], []))
            for index in range(2 * len(self.sent)):
                self.confirm(index)
            await self.settle()
            await asyncio.sleep(0.002)
        held = {name: count for name, count in self.service.held().items() if count}
        assert not held, held
        assert (self.allocator.free_pages, self.fabric.regions) == (PAGES, 1)
        assert not self.service.under_way()
        self.check()

    async def close(self):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


ACTIONS = {
    "ask": 8, "steps": 12, "arrive": 7, "say": 8, "confirm": 2, "cancel": 4, "compiled": 3, "checked": 8,
    "drop_router": 1, "lose_prefiller": 1, "break_connection": 1, "stand_still": 1, "sweep": 2, "trouble": 1,
}  # fmt: skip
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
ACTION = st.tuples(
    st.sampled_from([name for name, often in ACTIONS.items() for _ in range(often)]), st.integers(0, 9999)
)


@settings(max_examples=80, deadline=None, phases=PHASES)
@given(actions=st.lists(ACTION, min_size=20, max_size=100), verify=st.booleans())
def test_however_requests_end_everything_comes_back(actions, verify):
    with capture_logs():
        asyncio.run(play(actions, verify))


async def play(actions, verify):
    world = World(verify=verify)
    try:
        for name, number in actions:
            if (rest := getattr(world, name)(number)) is not None:
                await rest
            world.check()
            await world.settle()
            world.check()
        await world.everything_ends()
    finally:
        await world.close()


async def test_a_router_hears_once_that_its_request_has_to_wait():
    """Else it takes a decoder whose batch is full for one that doesn't answer, and asks elsewhere, or gives up."""
    world, told = World(verify=False), []
    world.router.reply = told.append
    try:
        for kind in (0, 0, 0, 0, 0, 1):  # the batch takes four; the last waits for its grammar
            world.ask(kind)
        await world.settle()
        for _ in range(2):
            world.sweep(1)
        heard = [(type(message).__name__, message.request_id) for message in told]
        assert heard == [*(("Accepted", f"r{n}") for n in range(4)), ("Queued", "r4"), ("Queued", "r5")]
        await world.everything_ends()
    finally:
        await world.close()
