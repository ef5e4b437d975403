"""The ZeroMQ front: a plain DEALER that says what a client may say, and what it may not."""

import asyncio
import os
import random

import pytest
import zmq
import zmq.asyncio
from kvferry_proto.codec import decode, encode
from kvferry_proto.errors import ErrorCode
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_client import Completed, Delta, Failed, ToClient
from kvferry_proto.to_router import CancelGenerate, ChatMessage, Generate
from router_rig import running_cluster, warm_up
from scripted import ANSWER
from structlog.testing import capture_logs
from text_folder import MODEL, make_model_folder

pytestmark = pytest.mark.usefixtures("folder", "nothing_left")
LONG = SamplingParams(max_tokens=100)
EARLY = "a request ended early"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    warm_up()
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def cluster(redis_server, folder):
    async with running_cluster(redis_server.url, folder) as cluster:
        yield cluster


class Client:
    def __init__(self, endpoint):
        self.ref = NodeRef("client-1", 77)
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.ipv6 = True
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def send(self, message):
        self.send_raw(encode(self.ref, message))

    def send_raw(self, parts):
        self.socket.send_multipart(parts, zmq.NOBLOCK)

    async def receive(self):
        async with asyncio.timeout(10):
            while not self.socket.poll(0):  # noqa: ASYNC110  # nothing here can set an event
                await asyncio.sleep(0.005)
        return decode(self.socket.recv_multipart(), ToClient).body

    async def answer(self, request_id):
        """Collect until the end."""
        deltas = []
        while isinstance(message := await self.receive(), Delta):
            assert message.id == request_id
            deltas.append(message)
        return "".join(delta.text for delta in deltas), [i for delta in deltas for i in delta.token_ids], message


@pytest.fixture
def client(cluster):
    client = Client(cluster.router.inbox.endpoint)
    yield client
    client.socket.close()


@pytest.mark.parametrize(
    "what",
    [
        {"prompt": "one two"},
        {"messages": [ChatMessage(role="user", content="Hi")]},
        {"prompt_ids": Int32s([50, 51, 52])},
    ],
    ids=["prompt", "messages", "ids"],
)
async def test_generate(cluster, client, what):
    decoder = await cluster.decoder()
    client.send(Generate(id="a", sampling=LONG, **what))
    text, ids, end = await client.answer("a")
    assert (text, ids) == (ANSWER, cluster.tokens())
    assert isinstance(end, Completed)
    assert (end.finish_reason, end.model) == ("stop", MODEL)
    assert end.usage.completion_tokens == len(ids)
    assert end.timeline.router.finished > end.timeline.router.received > 0
    # What clients call their requests stays here.
    assert decoder.assigned[0].request_id != "a"
    assert await cluster.metric('kvferry_requests_total{endpoint="zmq",status="200"}') == 1


async def test_stop_strings_and_logprobs(cluster, client):
    await cluster.decoder()
    client.send(Generate(id="a", prompt="x", sampling=SamplingParams(max_tokens=100, logprobs=2), stop=["answer"]))
    message = await client.receive()
    assert [len(entry.top) for entry in message.logprobs] == [2] * len(message.token_ids)
    text, _, end = await client.answer("a")
    assert (message.text + text, end.finish_reason) == ("Hello wörld, the ", "stop")


async def test_cancel(cluster, client, eventually):
    decoder = await cluster.decoder()
    decoder.pause_at = 2
    client.send(Generate(id="a", prompt="x", sampling=LONG))
    await eventually(lambda: decoder.assigned)
    client.send(CancelGenerate(id="a"))
    _, _, end = await client.answer("a")
    assert isinstance(end, Failed)
    assert end.error.code is ErrorCode.CANCELLED
    await eventually(lambda: decoder.cancelled)
    assert await cluster.metric('kvferry_requests_total{endpoint="zmq",status="499"}') == 1
    # The name is free again.
    decoder.pause_at = None
    client.send(Generate(id="a", prompt="x", sampling=LONG))
    assert (await client.answer("a"))[0] == ANSWER


async def test_the_log_says_where_a_cancelled_requests_time_went(cluster, client, eventually):
    """Nobody is left to be sent a time line, and such requests are the ones that are asked about."""
    decoder = await cluster.decoder()
    decoder.pause_at = 2
    with capture_logs() as logs:
        client.send(Generate(id="a", prompt="x", sampling=LONG))
        while await cluster.metric("kvferry_answer_tokens_total") < 2:  # noqa: ASYNC110  # nothing here sets an event
            await asyncio.sleep(0.02)
        client.send(CancelGenerate(id="a"))
        await client.answer("a")
        await eventually(lambda: any(line["event"] == EARLY for line in logs))
    (line,) = [line for line in logs if line["event"] == EARLY]
    assert (line["client_id"], line["code"], line["nodes"]) == ("a", "cancelled", ["d1"])
    assert (line["request_id"], line["answer_tokens"]) == (decoder.assigned[0].request_id, 2)
    # `joined` is the decoder's to know.
    assert {"accepted_ms", "first_token_ms", "joined_ms", "queued_ms", "finished_ms"} <= set(line["phases_ms"])


async def test_the_log_says_that_a_client_left_before_a_place_was_found(redis_server, folder, eventually):
    async with running_cluster(redis_server.url, folder, admission_seconds=30.0, recovery_seconds=30.0) as cluster:
        full = await cluster.decoder(free_pages=0)
        client = Client(cluster.router.inbox.endpoint)
        with capture_logs() as logs:
            client.send(Generate(id="a", prompt="x", sampling=LONG))
            await cluster.until(lambda state: state["held"]["waiting"])
            client.send(CancelGenerate(id="a"))
            await client.answer("a")
            await eventually(lambda: any(line["event"] == EARLY for line in logs))
        client.socket.close()
        (line,) = [line for line in logs if line["event"] == EARLY]
        assert (line["phase"], line["nodes"], line["attempts"], full.assigned) == ("route", [], 0, [])
        assert set(line["phases_ms"]) == {"finished_ms"}


async def test_cancel_in_the_same_breath(cluster, client):
    await cluster.decoder()
    client.send(Generate(id="a", prompt="x", sampling=LONG))
    client.send(CancelGenerate(id="a"))
    client.send(CancelGenerate(id="unknown"))
    _, _, end = await client.answer("a")
    assert isinstance(end, Failed)


async def test_a_name_in_use_is_refused_and_its_request_goes_on(cluster, client, eventually):
    decoder = await cluster.decoder()
    decoder.pause_at = 0
    client.send(Generate(id="a", prompt="x", sampling=LONG))
    client.send(Generate(id="a", prompt="y", sampling=LONG))
    refusal = await client.receive()
    assert isinstance(refusal, Refused)
    assert refusal.about == "a"
    decoder.go.set()
    assert (await client.answer("a"))[0] == ANSWER
    assert len(decoder.assigned) == 1


async def test_two_clients_may_use_the_same_names(cluster, client):
    await cluster.decoder()
    other = Client(cluster.router.inbox.endpoint)
    try:
        for each in (client, other):
            each.send(Generate(id="a", prompt="x", sampling=LONG))
        for each in (client, other):
            assert (await each.answer("a"))[0] == ANSWER
    finally:
        other.socket.close()


async def test_a_client_that_vanishes_is_noticed_when_something_is_sent(cluster, eventually):
    decoder = await cluster.decoder()
    decoder.pause_at = 1
    client = Client(cluster.router.inbox.endpoint)
    client.send(Generate(id="a", prompt="x", sampling=LONG))
    await client.receive()
    client.socket.close()
    await asyncio.sleep(0.1)
    decoder.pause_at = None
    decoder.answer = decoder.answer[:2] * 40
    decoder.go.set()
    await asyncio.wait_for(cluster.idle(), 60)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (Generate(id="a"), "exactly one"),
        (Generate(id="a", prompt="x", messages=[]), "prompt, messages"),
        (Generate(id="a", prompt=""), "empty"),
        (Generate(id="a", prompt_ids=Int32s([-1])), "-1"),
        (Generate(id="a", prompt="x", model="other"), "other"),
        (Generate(id="a", prompt="x", sampling=SamplingParams(max_tokens=1000)), "1000"),
        (Generate(id="a", messages=[ChatMessage(role="alien", content="x")]), "alien"),
    ],
)
async def test_bad_requests_fail_with_words(cluster, client, request_, param):
    await cluster.decoder()
    client.send(request_)
    failed = await client.receive()
    assert isinstance(failed, Failed)
    assert failed.error.status in (400, 404)
    assert param in failed.error.message


async def test_nobody_there(cluster, client):
    client.send(Generate(id="a", prompt="x"))
    assert (await client.receive()).error.code is ErrorCode.NO_NODES


async def test_garbage_is_counted_and_the_router_goes_on(cluster, client):
    await cluster.decoder()
    draw = random.Random(5)
    good = encode(client.ref, Generate(id="a", prompt_ids=Int32s([50, 51])))
    garbage = [[os.urandom(draw.randint(0, 200)) for _ in range(draw.randint(1, 7))] for _ in range(60)]
    garbage += [good[:1], [*good, b"1234"], [good[0], good[1][:-1]], [good[0].replace(b"Generate", b"Assign"), good[1]]]
    garbage += [[good[0].replace(b'"a"', b'"' + b"a" * 300 + b'"'), good[1]], [good[0].replace(b'"a"', b"5"), good[1]]]
    for parts in garbage:
        client.send_raw(parts)
    for _ in garbage:
        assert isinstance(await client.receive(), Refused)
    assert await cluster.metric("kvferry_wire_refused_total") == len(garbage)
    client.send(Generate(id="b", prompt="x", sampling=LONG))
    assert (await client.answer("b"))[0] == ANSWER
