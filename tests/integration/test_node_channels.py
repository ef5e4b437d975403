"""Inbox, Channel and Post over real sockets."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest
import structlog
import zmq
from cluster import free_port
from kvferry_node.channels import Channel, Curve, Inbox, Origin, Post
from kvferry_node.errors import BindError, PeerGone, QueueFull
from kvferry_node.metrics import NodeMetrics
from kvferry_node.sockets import HIGH_WATER
from kvferry_proto.codec import MAX_FRAME_BYTES, MAX_FRAMES, WireError, decode, encode
from kvferry_proto.errors import ErrorCode, Phase, fail
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef, Peer, new_incarnation
from kvferry_proto.to_decoder import CancelConfirmed, FromPrefiller
from kvferry_proto.to_prefiller import CancelPrefill, ToPrefiller
from kvferry_proto.to_router import CancelGenerate, Generate, ToRouter
from router_rig import warm_up
from wire import Wire

pytestmark = pytest.mark.usefixtures("nothing_left")

DECODER = NodeRef("decoder-1", new_incarnation())
PREFILLER = NodeRef("prefiller-1", new_incarnation())

LAYOUT = KVLayout(model="m", dtype="float32", layers=1, kv_heads=1, head_dim=1, page_size=1)


@pytest.fixture(scope="module", autouse=True)
def _threads() -> None:
    """Those that stay for as long as the process, before they are counted."""
    warm_up()


def cancel(number: int = 0) -> CancelPrefill:
    return CancelPrefill(request_id=f"r{number}", slot=number % 1024, generation=0)


def confirm(origin: Origin, message: CancelPrefill) -> None:
    origin.reply(CancelConfirmed(request_id=message.request_id, slot=message.slot, generation=message.generation))


class Ends:
    """An inbox with its metrics, a post, and what came back on it."""

    def __init__(self, handler: Callable[[Origin, Any], Any], curve: Curve | None = None, port: int = 0) -> None:
        self.metrics = NodeMetrics()
        self.inbox = Inbox(PREFILLER, "127.0.0.1", port, ToPrefiller, handler, self.metrics, curve)
        self.back: list[tuple[Origin, Any]] = []
        self.post_metrics = NodeMetrics()
        self.post = Post(DECODER, FromPrefiller, lambda *got: self.back.append(got), self.post_metrics, curve)
        self.peer = Peer(ref=PREFILLER, endpoint=self.inbox.endpoint)

    def channel(self) -> Channel:
        return self.post.to(self.peer)

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Ends"]:
        task = asyncio.create_task(self.inbox.run())
        try:
            yield self
        finally:
            self.post.close()
            self.inbox.close()
            await task


async def test_a_thousand_messages_go_and_are_answered_in_order(eventually):
    async with Ends(confirm).running() as ends:
        for number in range(1000):
            ends.channel().send(cancel(number))
            if number % 200 == 0:
                await asyncio.sleep(0)
        await eventually(lambda: len(ends.back) == 1000)
        assert [message.request_id for _, message in ends.back] == [f"r{number}" for number in range(1000)]
        origin, _ = ends.back[0]
        assert origin.sender == PREFILLER
        assert origin.peer == ends.peer
        assert len(ends.post) == 1
        # What else a peer tells about itself opens no second channel.
        assert ends.post.to(Peer(ref=PREFILLER, endpoint=ends.inbox.endpoint, layout=LAYOUT)) is ends.channel()
        assert ends.counted("kvferry_messages_total", type="CancelPrefill", direction="in") == 1000
        assert ends.counted("kvferry_messages_total", type="CancelConfirmed", direction="out") == 1000


async def test_async_handlers_run_beside_later_messages(eventually):
    gate = asyncio.Event()

    async def handler(origin: Origin, message: CancelPrefill) -> None:
        if message.slot == 0:
            await gate.wait()
        confirm(origin, message)

    async with Ends(handler).running() as ends:
        ends.channel().send(cancel(0))
        ends.channel().send(cancel(1))
        await eventually(lambda: len(ends.back) == 1)
        assert ends.back[0][1].slot == 1
        gate.set()
        await eventually(lambda: len(ends.back) == 2)


async def test_async_handler_that_never_ends_is_cancelled_on_close(eventually):
    started = asyncio.Event()
    ended = asyncio.Event()

    async def handler(origin: Origin, message: CancelPrefill) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Ends(handler).running() as ends:
        ends.channel().send(cancel())
        await eventually(started.is_set)
    await eventually(ended.is_set)


async def test_full_queue_is_refused_at_once_and_nothing_of_it_is_lost(eventually):
    seen: list[str] = []
    ends = Ends(lambda _origin, message: seen.append(message.request_id))
    # The inbox isn't read yet: both sides' queues and the kernel's buffers fill.
    with pytest.raises(QueueFull, match="prefiller-1"):
        await _flood(ends.channel())
    sent = int(ends.post_metrics.messages.labels("CancelPrefill", "out")._value.get())
    assert sent >= HIGH_WATER
    assert ends.post_metrics.registry.get_sample_value("kvferry_send_failures_total", {"reason": "full"}) == 1
    async with ends.running():
        await eventually(lambda: len(seen) == sent)
        assert seen == [f"r{number}" for number in range(sent)]


async def _flood(channel: Channel) -> None:
    for number in range(200_000):
        channel.send(cancel(number))
        if number % 500 == 0:
            await asyncio.sleep(0.001)


async def test_queue_to_a_peer_that_is_not_there_is_bounded():
    post = Post(DECODER, FromPrefiller, lambda *_: None, NodeMetrics())
    nobody = Peer(ref=PREFILLER, endpoint="tcp://127.0.0.1:9")
    for number in range(HIGH_WATER):
        post.to(nobody).send(cancel(number))
    with pytest.raises(QueueFull):
        post.to(nobody).send(cancel())
    post.close()


async def test_endpoint_that_makes_no_sense_is_peer_gone():
    post = Post(DECODER, FromPrefiller, lambda *_: None, NodeMetrics())
    with pytest.raises(PeerGone, match="nonsense"):
        post.to(Peer(ref=PREFILLER, endpoint="nonsense"))
    assert len(post) == 0
    post.close()


async def test_answer_to_a_caller_that_has_left_is_peer_gone(eventually):
    origins: list[Origin] = []
    async with Ends(lambda origin, _: origins.append(origin)).running() as ends:
        ends.channel().send(cancel())
        await eventually(lambda: origins)
        ends.post.forget(PREFILLER)

        def gone() -> bool:
            try:
                confirm(origins[0], cancel())
            except PeerGone:
                return True
            return False

        await eventually(gone)
        assert ends.counted("kvferry_send_failures_total", reason="gone") == 1


async def test_send_on_a_closed_channel_is_peer_gone():
    ends = Ends(confirm)
    async with ends.running():
        channel = ends.channel()
        ends.post.forget(PREFILLER)
        with pytest.raises(PeerGone):
            channel.send(cancel())


async def test_message_larger_than_a_receiver_takes_is_refused_at_the_sender():
    async with Ends(confirm).running() as ends:
        with pytest.raises(WireError, match="size"):
            ends.channel().send(CancelPrefill(request_id="x" * (2 << 20), slot=0, generation=0))


async def test_handler_exception_is_answered_and_counted(eventually):
    def handler(origin: Origin, message: CancelPrefill) -> None:
        if message.slot == 1:
            raise RuntimeError("kaput")
        if message.slot == 2:
            raise fail(ErrorCode.OVERLOADED, "no place", Phase.PREFILL, "prefiller-1")
        confirm(origin, message)

    with structlog.testing.capture_logs() as logs:
        async with Ends(handler).running() as ends:
            for number in (1, 2, 3):
                ends.channel().send(cancel(number))
            await eventually(lambda: len(ends.back) == 3)
    first, second, third = (message for _, message in ends.back)
    assert isinstance(first, Refused)
    assert (first.reason, first.about) == ("internal", "r1")
    assert "kaput" in first.detail
    assert (second.reason, second.about) == ("overloaded", "r2")
    assert isinstance(third, CancelConfirmed)
    assert ends.counted("kvferry_handler_errors_total", type="CancelPrefill") == 2
    assert [log["event"] for log in logs].count("handler failed") == 1  # the second within a second is held back


async def test_async_handler_exception_is_answered(eventually):
    async def handler(origin: Origin, message: CancelPrefill) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("kaput")

    async with Ends(handler).running() as ends:
        ends.channel().send(cancel(7))
        await eventually(lambda: ends.back)
        assert ends.back[0][1].about == "r7"


async def reopened(ref: NodeRef, port: int, handler: Callable[[Origin, Any], Any]) -> Inbox:
    """An inbox at a port that another has closed a moment ago: ZeroMQ's own thread gives it back."""
    async with asyncio.timeout(10):
        while True:
            try:
                return Inbox(ref, "127.0.0.1", port, ToPrefiller, handler, NodeMetrics())
            except BindError:
                await asyncio.sleep(0.01)


async def test_node_restarted_behind_the_same_port_refuses_what_its_predecessor_was_meant_to_get(eventually):
    port = free_port()
    first = Ends(confirm, port=port)
    successor_ref = NodeRef(PREFILLER.id, new_incarnation())
    handled: list[Any] = []
    async with first.running():
        first.channel().send(cancel(1))
        await eventually(lambda: len(first.back) == 1)
        first.inbox.close()
        successor = await reopened(successor_ref, port, lambda *got: handled.append(got))
        task = asyncio.create_task(successor.run())
        # The channel reconnects by itself, and what is sent on it is meant for the dead.
        first.channel().send(cancel(2))
        await eventually(lambda: len(first.back) == 2)
        origin, refused = first.back[1]
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.about) == ("stale", "r2")
        assert origin.sender == successor_ref
        assert origin.peer == first.peer
        assert handled == []
        # The new life has a channel of its own, which what concerns the old one does not touch.
        old = first.channel()
        new = first.post.to(Peer(ref=successor_ref, endpoint=successor.endpoint))
        assert new is not old
        assert first.channel() is old
        first.post.forget(PREFILLER)
        assert len(first.post) == 1
        with pytest.raises(PeerGone):
            old.send(cancel(3))
        new.send(cancel(4))
        await eventually(lambda: handled)
        successor.close()
        await task


async def test_a_connection_that_is_back_after_a_break_is_told_of_before_what_comes_by_it(eventually):
    async with Ends(confirm).running() as ends, Wire(ends.inbox.endpoint) as wire:
        back: list[Any] = []
        post = Post(
            DECODER, FromPrefiller, lambda _, message: back.append(message.slot), NodeMetrics(), on_return=back.append
        )
        channel = post.to(Peer(ref=PREFILLER, endpoint=wire.endpoint))
        channel.send(cancel(1))
        await eventually(lambda: back == [1])
        for number in (2, 3):
            await wire.cut()
            channel.send(cancel(number))
            await asyncio.sleep(0.05)
            await wire.mend()
            await eventually(lambda number=number: back[-1] == number)
        assert back == [1, PREFILLER, 2, PREFILLER, 3]
        post.close()


async def test_message_of_a_stranger_on_a_channel_is_refused(eventually):
    """Whoever sits behind the endpoint of a peer must be that peer."""
    stranger = NodeRef(PREFILLER.id, new_incarnation())
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    back: list[Any] = []
    post = Post(DECODER, FromPrefiller, lambda *got: back.append(got), NodeMetrics())
    post.to(Peer(ref=PREFILLER, endpoint=f"tcp://127.0.0.1:{port}")).send(cancel())
    await eventually(lambda: router.poll(0))
    identity, *_ = router.recv_multipart()
    forged = CancelConfirmed(request_id="r0", slot=0, generation=0)
    router.send_multipart([identity, *encode(stranger, forged, DECODER.incarnation)])
    await eventually(lambda: router.poll(0))
    answer = decode(router.recv_multipart()[1:], Refused)
    assert answer.body.reason == "stale"
    assert back == []
    post.close()
    router.close()


async def test_port_in_use_is_named():
    ends = Ends(confirm)
    port = int(ends.inbox.endpoint.rpartition(":")[2])
    with pytest.raises(BindError, match=rf"127\.0\.0\.1:{port}.*--zmq-port"):
        Inbox(PREFILLER, "127.0.0.1", port, ToPrefiller, confirm, NodeMetrics())
    ends.inbox.close()
    ends.post.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_wildcard_address_is_not_published(host):
    with pytest.raises(BindError, match="cannot be published"):
        Inbox(PREFILLER, host, 0, ToPrefiller, confirm, NodeMetrics())


async def test_with_curve_only_those_who_know_the_key_are_heard(eventually, tmp_path):
    zmq.auth.create_certificates(tmp_path, "cluster")
    curve = Curve.load(str(tmp_path / "cluster.key_secret"))
    assert curve is not None
    seen: list[str] = []

    def handler(origin: Origin, message: CancelPrefill) -> None:
        seen.append(message.request_id)
        confirm(origin, message)

    async with Ends(handler, curve).running() as ends:
        outsiders = [None, Curve(*zmq.curve_keypair())]
        posts = [Post(NodeRef("mallory", 1), FromPrefiller, lambda *_: None, NodeMetrics(), key) for key in outsiders]
        for post in posts:
            post.to(ends.peer).send(CancelPrefill(request_id="forged", slot=0, generation=0))
        ends.channel().send(cancel(1))
        await eventually(lambda: ends.back)
        # Their handshakes were tried before and again meanwhile; more time changes nothing.
        await asyncio.sleep(0.3)
        assert seen == ["r1"]
        for post in posts:
            post.close()


# --- garbage --------------------------------------------------------------------------------------------------------


def garbage(rng: random.Random) -> list[bytes]:
    """Return a random multipart: noise, JSON of the wrong shape, or a good message with a part bent."""
    choice = rng.randrange(5)
    if choice == 0:
        return [rng.randbytes(rng.randrange(80)) for _ in range(rng.randint(1, MAX_FRAMES + 4))]
    if choice == 1:
        scalars: list[Any] = [None, True, 1, -1.5, "x", [], {}, 2**63, [[]] * 5]
        return [orjson.dumps({"sender": rng.choice(scalars), "body": rng.choice(scalars), "to": rng.choice(scalars)})]
    good = encode(DECODER, Generate(id="g", prompt_ids=Int32s(range(50))))
    if choice == 2:
        return [good[0], good[1][: rng.randrange(len(good[1]))]]
    if choice == 3:
        header = bytearray(good[0])
        for _ in range(rng.randint(1, 10)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        return [bytes(header), *good[1:]]
    return [b"[" * rng.randrange(1, 5000), *good[1:]]


async def test_garbage_is_counted_and_answered_and_the_inbox_lives_on(eventually):
    rng = random.Random(7)
    heard: list[Any] = []

    def handler(origin: Origin, message: Any) -> None:
        heard.append(message)
        origin.reply(Refused(reason="unexpected", detail="heard"))

    metrics = NodeMetrics()
    inbox = Inbox(PREFILLER, "127.0.0.1", 0, ToRouter, handler, metrics)
    task = asyncio.create_task(inbox.run())
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(inbox.endpoint)
    sent, answers = 600, []
    with structlog.testing.capture_logs() as logs:
        for number in range(sent):
            dealer.send_multipart(garbage(rng))
            if number % 50 == 0:
                await asyncio.sleep(0.001)
        dealer.send_multipart(encode(DECODER, CancelGenerate(id="still there")))

        def drained() -> bool:
            while dealer.poll(0):
                answers.append(decode(dealer.recv_multipart(), Refused))
            return any(isinstance(message, CancelGenerate) and message.id == "still there" for message in heard)

        await eventually(drained)
        await eventually(lambda: (drained(), len(answers) == sent + 1)[1])
    refused = sum(
        sample.value
        for metric in metrics.wire_refused.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )
    assert refused == sent + 1 - len(heard)  # a bent header is now and then a message after all
    assert refused > sent * 0.8
    assert 1 <= len(logs) < 20, "a flood must not fill the log"
    dealer.close()
    inbox.close()
    await task


async def test_frame_beyond_the_limit_costs_its_sender_the_connection_and_nobody_else(eventually):
    async with Ends(confirm).running() as ends:
        ends.channel().send(cancel(1))
        await eventually(lambda: len(ends.back) == 1)
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(ends.inbox.endpoint)
        dealer.send_multipart([b"{}", bytes(MAX_FRAME_BYTES + 1)])
        await asyncio.sleep(0.05)
        ends.channel().send(cancel(2))
        await eventually(lambda: len(ends.back) == 2)
        dealer.close()


async def test_unreadable_refusal_is_not_answered(eventually):
    """Two nodes that don't understand each other must not refuse each other's refusals for ever."""
    async with Ends(confirm).running() as ends:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(ends.inbox.endpoint)
        for header in ({"body": {"type": "Refused"}}, {"body": {"type": "Refused", "reason": 3}, "sender": 1}):
            dealer.send(orjson.dumps(header))
        dealer.send_multipart(encode(DECODER, Refused(reason="type", detail="")))
        dealer.send_multipart(encode(DECODER, Refused(reason="type", detail=""), to=12345))
        dealer.send_multipart(encode(DECODER, cancel(1)))
        await eventually(lambda: dealer.poll(0))
        assert isinstance(decode(dealer.recv_multipart(), FromPrefiller).body, CancelConfirmed)
        assert dealer.poll(0) == 0
        dealer.close()
