"""What no peer would send, on every socket of a cluster: answered or dropped, counted, logged, and nothing held."""

import asyncio
import itertools
import json
import random
import socket
import struct
from contextlib import closing

import httpx
import msgspec
import pytest
from cluster import Cluster, wait_for
from kvferry_fabric import TransferEngine
from kvferry_proto.codec import MAX_FRAME_BYTES, MAX_HEADER_BYTES
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.memory import LocalMemory, MemoryDescriptor
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef, Peer
from kvferry_proto.page_table import Source
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.timeline import PrefillTimeline
from kvferry_proto.to_decoder import Assign, Cancel, CancelConfirmed, PrefillFailed, PrefillReport
from kvferry_proto.to_prefiller import CancelPrefill, Prefill
from kvferry_proto.to_router import CancelGenerate, Generate
from stranger import Impostor, Stranger, record_of
from streams import Golden, Stream, prompt

pytestmark = pytest.mark.faults

SALTS = itertools.count()
"""One for each message: what one test leaves in a cache is nothing to the next."""

NODES = ["router", "prefiller0", "decoder0"]
REASONS = {"size", "json", "type"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory, tiny_model):
    common = ["--heartbeat-seconds", "0.2"]
    worker = ["--dtype", "float32", "--kv-memory", "2MiB", "--page-size", "8"]
    decoder = ["--local-prefill-tokens", "8", "--cancel-retry-seconds", "0.3"]
    folder = tmp_path_factory.mktemp("malformed")
    with Cluster(folder, tiny_model, common=common, worker=worker, decoder=decoder) as cluster:
        cluster.golden = Golden(cluster)
        yield cluster
        cluster.golden.check()


@pytest.fixture
def cluster(shared):
    """The cluster; afterwards it is as it was: the same processes, nothing held, the same answer."""
    before = {name: node.process.pid for name, node in shared.nodes.items()}
    yield shared
    for node in shared.nodes.values():
        assert node.process.poll() is None, f"{node.name} has ended:\n{node.tail()[-3000:]}"
    assert shared.golden.ask(41) == shared.golden.answers[41]
    shared.wait_idle()
    assert {name: node.process.pid for name, node in shared.nodes.items()} == before


def counted(node, name):
    return sum(float(line.split()[-1]) for line in node.metrics().splitlines() if line.startswith(name))


# --- frames that are no messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NODES)
def test_random_frames_are_refused_counted_and_logged(cluster, name):
    draw = random.Random(name)
    node = cluster[name]
    before, logged = counted(node, "kvferry_wire_refused_total"), len(node.events("refused a message"))
    with Stranger(cluster, name) as stranger:
        for _ in range(200):
            stranger.parts(*(draw.randbytes(draw.choice([0, 1, 4, 100])) for _ in range(draw.randrange(1, 9))))
        answers = [stranger.hear() for _ in range(200)]
    assert {answer["type"] for answer in answers} == {"Refused"}
    assert {answer["reason"] for answer in answers} <= REASONS
    assert counted(node, "kvferry_wire_refused_total") == before + 200
    assert len(node.events("refused a message")) > logged


ME = {"id": "x", "incarnation": 1}
PLAUSIBLE = {
    "router": {"type": "Generate", "id": "a", "prompt": "b"},
    "prefiller0": {"type": "CancelPrefill", "request_id": "a", "slot": 1, "generation": 1},
    "decoder0": {"type": "Cancel", "request_id": "a"},
}


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize(
    ("envelope", "frames", "reason"),
    [
        ({"body": {"type": "Nonsense"}}, [], "type"),
        ({"body": {"type": 5}}, [], "type"),
        ({"body": {}}, [], "type"),
        ({"body": None}, [], "type"),
        ({"body": []}, [], "type"),
        ({"sender": None}, [], "type"),
        ({"sender": {"id": "", "incarnation": 1}}, [], "type"),
        ({"sender": {"id": "x" * 200, "incarnation": 1}}, [], "type"),
        ({"sender": {"id": "x", "incarnation": "1"}}, [], "type"),
        ({"sender": {"id": "x", "incarnation": 1.5}}, [], "type"),
        ({"to": "me"}, [], "type"),
        ({"to": [1]}, [], "type"),
        ({}, [b"\0\0\0\0"], "type"),
        ({}, [b""] * 5, "size"),
        ({"request_id": "a" * 1000}, [b"\0"], "type"),
    ],
)
def test_headers_of_wrong_types(cluster, name, envelope, frames, reason):
    head = {"sender": ME, "body": PLAUSIBLE[name]} | envelope
    with Stranger(cluster, name) as stranger:
        stranger.parts(json.dumps(head).encode(), *frames)
        answer = stranger.hear()
    assert (answer["type"], answer["reason"]) == ("Refused", reason)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("router", {"type": "Generate", "id": "a" * 129, "prompt": "b"}),
        ("router", {"type": "Generate", "id": "", "prompt": "b"}),
        ("router", {"type": "Generate", "id": 7, "prompt": "b"}),
        ("router", {"type": "Generate", "id": "a", "prompt": 7}),
        ("router", {"type": "Generate", "id": "a", "prompt": "b", "sampling": {"temperature": 3}}),
        ("router", {"type": "Generate", "id": "a", "prompt": "b", "sampling": {"max_tokens": 0}}),
        ("router", {"type": "Generate", "id": "a", "prompt": "b", "sampling": {"seed": 1 << 70}}),
        ("router", {"type": "Generate", "id": "a", "prompt": "b", "stop": ["x"] * 17}),
        ("router", {"type": "Assign", "request_id": "a"}),
        ("decoder0", {"type": "Cancel", "request_id": "a" * 129}),
        ("decoder0", {"type": "Cancel", "request_id": ""}),
        ("decoder0", {"type": "Cancel", "request_id": None}),
        ("decoder0", {"type": "PrefillReport", "request_id": "a", "slot": 1, "generation": 1, "timeline": {}}),
        ("decoder0", {"type": "Prefill", "request_id": "a"}),
        ("prefiller0", {"type": "CancelPrefill", "request_id": "a", "slot": 1024, "generation": 1}),
        ("prefiller0", {"type": "CancelPrefill", "request_id": "a", "slot": -1, "generation": 1}),
        ("prefiller0", {"type": "CancelPrefill", "request_id": "a", "slot": 1, "generation": 1 << 40}),
        ("prefiller0", {"type": "CancelPrefill", "request_id": "a", "slot": True, "generation": 1}),
        ("prefiller0", {"type": "Assign", "request_id": "a"}),
    ],
)
def test_bodies_of_wrong_types(cluster, name, body):
    with Stranger(cluster, name) as stranger:
        # JSON of any size of number: orjson writes none beyond 64 bits.
        stranger.parts(json.dumps({"sender": ME, "body": body}).encode())
        answer = stranger.hear()
    assert (answer["type"], answer["reason"]) == ("Refused", "type")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"sender":{"id":"x","incarnation":1},"body":{"type":"Cancel","request_id":NaN}}',
        b'{"sender":{"id":"\\ud800","incarnation":1},"body":{"type":"Cancel","request_id":"a"}}',
        b'{"sender":{"id":"\xff","incarnation":1},"body":{"type":"Cancel","request_id":"a"}}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\0" * 1000,
    ],
)
@pytest.mark.parametrize("name", NODES)
def test_headers_that_are_no_json(cluster, name, raw):
    with Stranger(cluster, name) as stranger:
        stranger.parts(raw)
        answer = stranger.hear()
    assert (answer["type"], answer["reason"]) == ("Refused", "json")


@pytest.mark.parametrize("name", NODES)
def test_huge_parts_are_refused_or_cost_their_sender_the_connection(cluster, name):
    with Stranger(cluster, name) as stranger:
        stranger.parts(b" " * (MAX_HEADER_BYTES + 1))
        assert stranger.hear()["reason"] == "size"
        stranger.parts(b"{}" + b" " * MAX_FRAME_BYTES)
        stranger.parts(b"{}", b"\0" * (MAX_FRAME_BYTES + 4))
        # ZeroMQ drops the connection and makes another one.
        wait_for(lambda: _heard(stranger), 60, "an answer after the reconnection")


def _heard(stranger):
    stranger.parts(b"{}")
    return not stranger.nothing_heard() and stranger.hear()["reason"] == "type"


@pytest.mark.parametrize("name", NODES)
def test_a_refusal_never_quotes_so_much_that_it_cannot_be_sent(cluster, name):
    room = MAX_HEADER_BYTES - len(json.dumps({"sender": ME, "body": {"type": ""}}).encode())
    with Stranger(cluster, name) as stranger:
        for text in ("A" * room, "\\n" * (room // 2), '\\"' * (room // 2)):
            stranger.parts(json.dumps({"sender": ME, "body": {"type": "@"}}).replace("@", text).encode())
            answer = stranger.hear()
            assert (answer["type"], answer["reason"]) == ("Refused", "type")
            assert len(answer["detail"]) < 1000
    assert max(map(len, cluster[name].log.read_text().splitlines())) < 10_000


def test_a_refusal_is_never_answered(cluster):
    for name in NODES:
        with Stranger(cluster, name) as stranger:
            stranger.say(Refused(reason="type", detail="x" * 100_000))
            stranger.header({"type": "Refused", "reason": 5})
            assert stranger.nothing_heard()


@pytest.mark.parametrize("name", NODES)
def test_a_burst_of_small_garbage_from_somebody_who_reads_nothing(cluster, name):
    node = cluster[name]
    before = counted(node, "kvferry_wire_refused_total")
    with Stranger(cluster, name) as stranger:
        for _ in range(10_000):
            stranger.parts(b"garbage")
        # Served meanwhile.
        assert cluster.golden.ask(41) == cluster.golden.answers[41]
        wait_for(lambda: counted(node, "kvferry_wire_refused_total") == before + 10_000, 60, "all counted")


# --- messages to a prefiller ---------------------------------------------------------------------------------------


class Victim:
    """Registered memory of the test's own, for prefillers to write to."""

    def __init__(self, layout, pages=8):
        self.layout = layout
        self.engine = TransferEngine("tcp", incarnation=1)
        self.memory = bytearray(layout.layers * layout.page_bytes * pages)
        self.region = self.engine.register(memoryview(self.memory))

    def close(self):
        self.engine.close()


@pytest.fixture
def victim(cluster):
    with closing(Victim(record_of(cluster, "prefiller0").layout)) as victim:
        yield victim


def order(victim, **changes):
    fields = {
        "request_id": "hostile",
        "tokens": Int32s(prompt(20)),
        "pages": Int32s([3, 5, 0]),
        "slot": 1,
        "generation": 1,
        "layout": victim.layout,
        "memory": [victim.region.descriptor],
        "cache_salt": f"{next(SALTS)}",
    }
    return Prefill(**(fields | changes))


def described(victim, **changes):
    return [msgspec.structs.replace(victim.region.descriptor, **changes)]


def through(victim, **changes):
    """The victim's memory, with the one domain that it is reached through changed."""
    return described(victim, domains=(msgspec.structs.replace(victim.region.descriptor.domains[0], **changes),))


def test_an_order_of_a_stranger_that_is_in_order_is_carried_out(cluster, victim):
    """The control of the tests below: what they change is all that is wrong."""
    with in_the_name_of("decoder0", cluster, "prefiller0") as stranger:
        stranger.say(order(victim))
        assert stranger.hear()["type"] == "PrefillReport"
    assert any(victim.memory)


def in_the_name_of(peer, cluster, name):
    """Somebody whom the node knows to live. What a stranger wants is called off once the view of the cluster has had
    time to catch up, which a busy machine, or an address that is tried for a while, takes."""
    return Stranger(cluster, name, ref=record_of(cluster, peer).ref)


HOSTILE_ORDERS = {
    "page beyond the pool": lambda v: {"pages": Int32s([3, 5, 8])},
    "page far beyond the pool": lambda v: {"pages": Int32s([3, 5, (1 << 31) - 1])},
    "negative page": lambda v: {"pages": Int32s([3, -1, 0])},
    "page named twice": lambda v: {"pages": Int32s([3, 3, 0])},
    "page table too short": lambda v: {"pages": Int32s([3, 5])},
    "page table too long": lambda v: {"pages": Int32s([3, 5, 0, 1])},
    "no pages": lambda v: {"pages": Int32s()},
    "more pages than are lacking": lambda v: {"first_page": 1},
    "nothing lacking": lambda v: {"first_page": 3, "pages": Int32s()},
    "countless pages held": lambda v: {"first_page": 1 << 40, "pages": Int32s([3])},
    "no tokens": lambda v: {"tokens": Int32s(), "pages": Int32s()},
    "token beyond the vocabulary": lambda v: {"tokens": Int32s([*prompt(19), 49152])},
    "negative token": lambda v: {"tokens": Int32s([*prompt(19), -5])},
    "more tokens than the model has positions": lambda v: {
        "tokens": Int32s([7] * 5000),
        "pages": Int32s(range(625)),
        "memory": described(v, length=625 * v.layout.layers * v.layout.page_bytes),
    },
    "no memory": lambda v: {"memory": []},
    "too many memories": lambda v: {"memory": [v.region.descriptor] * 2},
    "memory of length 0": lambda v: {"memory": described(v, length=0)},
    "memory of negative length": lambda v: {"memory": described(v, length=-len(v.memory))},
    "memory of torn length": lambda v: {"memory": described(v, length=len(v.memory) - 1)},
    "memory at a negative address": lambda v: {"memory": through(v, base=-5)},
    "negative key": lambda v: {"memory": through(v, key=-1)},
    "memory of no domain": lambda v: {"memory": described(v, domains=())},
    "memory of nine domains": lambda v: {"memory": described(v, domains=v.region.descriptor.domains * 9)},
    "foreign provider": lambda v: {"memory": described(v, provider="efa")},
    "address of nothing": lambda v: {"memory": through(v, address="")},
    "address that is no hex": lambda v: {"memory": through(v, address="nowhere")},
    "address of garbage": lambda v: {"memory": through(v, address="ff" * 16)},
    "address of a family of its own": lambda v: {"memory": through(v, address="0a00" + "7f" * 14)},
    "address of port 0": lambda v: {"memory": through(v, address="020000007f000001" + "00" * 8)},
    "address too long": lambda v: {"memory": through(v, address="ff" * 100_000)},
    "seat of somebody else": lambda v: {"memory": described(v, local=LocalMemory(seat="dbus-session", key=1))},
    "seat too long": lambda v: {"memory": described(v, local=LocalMemory(seat="kvferry-" * 10_000, key=1))},
    "negative local key": lambda v: {"memory": described(v, local=LocalMemory(seat="", key=-1))},
    "other model": lambda v: {"layout": msgspec.structs.replace(v.layout, model="other")},
    "other page size": lambda v: {"layout": msgspec.structs.replace(v.layout, page_size=16)},
    "countless ranks": lambda v: {"layout": msgspec.structs.replace(v.layout, ranks=v.layout.kv_heads * 10**9)},
}


@pytest.mark.parametrize("what", HOSTILE_ORDERS)
def test_a_hostile_order_is_refused_before_anything_is_written(cluster, victim, what):
    with Stranger(cluster, "prefiller0") as stranger:
        stranger.say(order(victim, **HOSTILE_ORDERS[what](victim)))
        answer = stranger.hear()
        assert answer["type"] == "PrefillFailed", answer
        assert answer["request_id"] == "hostile"
        assert answer["error"]["node"] == "prefiller0"
        assert answer["error"]["code"] != "internal"
    assert not any(victim.memory)


HOSTILE_WRITES = {
    "key of nothing": lambda v: {"memory": through(v, key=v.region.descriptor.domains[0].key + 977)},
    "memory that is longer than registered": lambda v: {
        "memory": described(v, length=1000 * v.layout.layers * v.layout.page_bytes),
        "pages": Int32s([997, 998, 999]),
    },
    "memory beside what is registered": lambda v: {
        "memory": through(v, base=v.region.descriptor.domains[0].base + (1 << 30)),
    },
    "address where nobody listens": lambda v: {"memory": through(v, address=_nobodys_address())},
}


def _nobodys_address():
    with closing(TransferEngine("tcp", incarnation=1)) as engine:
        return engine.addresses[0]


@pytest.mark.parametrize("what", HOSTILE_WRITES)
def test_writes_that_the_other_side_cannot_take_fail_the_order_alone(cluster, victim, what):
    with in_the_name_of("decoder0", cluster, "prefiller0") as stranger:
        stranger.say(order(victim, **HOSTILE_WRITES[what](victim)))
        answer = stranger.hear()
        assert answer["type"] == "PrefillFailed", answer
        assert (answer["request_id"], answer["error"]["node"]) == ("hostile", "prefiller0")
        assert (answer["error"]["code"], answer["error"]["phase"]) == ("transfer_failed", "transfer")
    assert not any(victim.memory)


async def test_a_stranger_with_a_wrong_key_to_a_decoder_costs_no_request(cluster):
    """The decoder's own address, as its prefillers know it, and a key that it never gave."""
    decoder = record_of(cluster, "decoder0")
    living = record_of(cluster, "prefiller0").ref
    with Impostor(ref=living) as impostor, in_the_name_of("router", cluster, "decoder0") as router:
        router.say(assign(prefiller=Peer(ref=impostor.ref, endpoint=impostor.endpoint, layout=decoder.layout)))
        header, _ = impostor.hear()
        memory = msgspec.convert(header["body"]["memory"][0], MemoryDescriptor)
        router.say(Cancel(request_id="hostile"))
        asked, _ = impostor.hear()
        assert asked["body"]["type"] == "CancelPrefill"
        slot, generation = asked["body"]["slot"], asked["body"]["generation"]
        impostor.say(CancelConfirmed(request_id="hostile", slot=slot, generation=generation))
        running = [Stream(cluster.url, prompt(200, seed), 40) for seed in range(4)]
        with in_the_name_of("decoder0", cluster, "prefiller0") as stranger:
            for _ in range(5):
                domain = msgspec.structs.replace(memory.domains[0], key=memory.domains[0].key + 977)
                local = msgspec.structs.replace(memory.local, key=memory.local.key + 977)
                wrong = msgspec.structs.replace(memory, domains=(domain,), local=local)
                stranger.say(order_of(decoder.layout, wrong))
                assert (await asyncio.to_thread(stranger.hear))["error"]["code"] == "transfer_failed"
        answers = [await stream.end() for stream in running]
    assert answers == [await Stream(cluster.url, prompt(200, seed), 40).end() for seed in range(4)]


def order_of(layout, memory):
    tokens, pages = Int32s(prompt(20)), Int32s([0, 1, 2])
    return Prefill(
        request_id="hostile", tokens=tokens, pages=pages, slot=999, generation=1, layout=layout, memory=[memory]
    )


def test_the_same_order_twice_and_cancels_of_nothing(cluster, victim):
    with in_the_name_of("decoder0", cluster, "prefiller0") as stranger:
        with cluster.slow_motion("prefiller0"):
            stranger.say(order(victim))
            stranger.say(order(victim))
            answers = [stranger.hear()]
        answers += [stranger.hear()]
        assert sorted(answer["type"] for answer in answers) == ["PrefillFailed", "PrefillReport"], json.dumps(answers)
        stranger.say(CancelPrefill(request_id="never heard of", slot=5, generation=6))
        answer = stranger.hear()
    assert answer == {"type": "CancelConfirmed", "request_id": "never heard of", "slot": 5, "generation": 6}


@pytest.mark.parametrize(
    ("reference", "frames"),
    [
        ([0, 5], [b"\0" * 19]),
        ([0, 5], [b"\0" * 16]),
        ([0, 5], []),
        ([0, 1 << 40], [b"\0" * 20]),
        ([1, 5], [b"\0" * 20]),
        ([-1, 5], [b"\0" * 20]),
        ([0, -5], [b"\0" * 20]),
        ([0.0, 5], [b"\0" * 20]),
        ([True, 5], [b"\0" * 20]),
        ([0], [b"\0" * 20]),
        ([1, 2, 3, 4, 5], []),
        ("tokens", []),
        (None, []),
        (1 << 60, []),
    ],
)
@pytest.mark.parametrize("name", NODES)
def test_int_arrays_that_are_torn(cluster, name, reference, frames):
    bodies = {
        "router": {"type": "Generate", "id": "a", "prompt_ids": reference},
        "decoder0": {"type": "Assign", "request_id": "a", "tokens": reference, "page_table": [1, 1]},
        "prefiller0": {"type": "Prefill", "request_id": "a", "tokens": reference, "pages": [1, 1]},
    }
    if name == "router" and reference is None:
        pytest.skip("null is no prompt, and no mistake")
    with Stranger(cluster, name) as stranger:
        stranger.header(bodies[name], frames)
        answer = stranger.hear()
    assert (answer["type"], answer["reason"]) == ("Refused", "type")


# --- messages to a decoder -----------------------------------------------------------------------------------------


def table(tokens, source=Source.LOCAL):
    return Int32s([0, 0, source] * -(-(tokens - 1) // 8))


def assign(**changes):
    fields = {
        "request_id": "hostile",
        "tokens": Int32s(prompt(20)),
        "page_table": table(20, Source.PREFILLER if changes.get("prefiller") else Source.LOCAL),
        "sampling": SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        "stop_token_ids": [2],
        "cache_salt": f"{next(SALTS)}",
    }
    return Assign(**(fields | changes))


HOSTILE_ASSIGNMENTS = {
    "no tokens": ({"tokens": Int32s(), "page_table": Int32s()}, "bad_request"),
    "token beyond the vocabulary": ({"tokens": Int32s([5, 49152]), "page_table": table(2)}, "bad_request"),
    "negative token": ({"tokens": Int32s([5, -1]), "page_table": table(2)}, "bad_request"),
    "more tokens than fit": ({"tokens": Int32s([5] * 5000), "page_table": table(5000)}, "prompt_too_long"),
}


@pytest.mark.parametrize("what", HOSTILE_ASSIGNMENTS)
def test_a_hostile_assignment_is_refused(cluster, what):
    changes, code = HOSTILE_ASSIGNMENTS[what]
    with Stranger(cluster, "decoder0") as stranger:
        stranger.say(assign(**changes))
        answer = stranger.hear()
        assert (answer["type"], answer["request_id"]) == ("RequestFailed", "hostile")
        assert (answer["error"]["code"], answer["error"]["node"]) == (code, "decoder0")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_table": Int32s()},
        {"page_table": Int32s([1])},
        {"page_table": Int32s([(1 << 31) - 1, -(1 << 31), 99] * 1000)},
        {"answered": 1 << 40},
        {"answered": -7},
        {"stop_token_ids": [-1, 1 << 62]},
        {"sampling": SamplingParams(temperature=1e-300, max_tokens=4, ignore_eos=True)},
        {"sampling": SamplingParams(temperature=2, top_p=1e-300, top_k=1 << 20, max_tokens=4, ignore_eos=True)},
        {"sampling": SamplingParams(temperature=1, seed=(1 << 63) - 1, logprobs=20, max_tokens=4, ignore_eos=True)},
    ],
)
def test_an_odd_assignment_has_an_end(cluster, changes):
    with in_the_name_of("router", cluster, "decoder0") as stranger:
        stranger.say(assign(**changes))
        assert stranger.hear_until("Finished", "RequestFailed")["request_id"] == "hostile"


def test_an_assignment_for_an_earlier_life_is_refused(cluster):
    with Stranger(cluster, "decoder0") as stranger:
        stranger.say(assign(), to=stranger.record.ref.incarnation + 1)
        answer = stranger.hear()
    assert (answer["type"], answer["reason"], answer["about"]) == ("Refused", "stale", "hostile")


def test_the_same_request_id_twice(cluster):
    with in_the_name_of("router", cluster, "decoder0") as stranger:
        with cluster.slow_motion("decoder0"):
            stranger.say(assign(sampling=SamplingParams(max_tokens=100, ignore_eos=True)))
            stranger.say(assign())
            assert stranger.hear_until("RequestFailed")["error"]["code"] == "bad_request"
        assert stranger.hear_until("Finished")["usage"]["completion_tokens"] == 100


def test_sampling_that_is_not_a_number(cluster):
    for number in ("NaN", "Infinity", "1e400", '"1"', "-1", "null"):
        with Stranger(cluster, "decoder0") as stranger:
            body = {"type": "Assign", "request_id": "a", "tokens": [0, 1], "page_table": [1, 0], "stop_token_ids": []}
            head = json.dumps({"sender": ME, "body": body | {"sampling": {"temperature": "@"}}})
            stranger.parts(head.replace('"@"', number).encode(), b"\5\0\0\0", b"")
            answer = stranger.hear()
            assert answer["type"] == "Refused", number
            assert answer["reason"] in {"json", "type"}


@pytest.mark.parametrize(
    ("endpoint", "codes"),
    [
        ("", {"node_lost"}),
        ("nonsense", {"node_lost"}),
        ("tcp://", {"node_lost"}),
        ("tcp://127.0.0.1:notaport", {"node_lost"}),
        ("tcp://no.such.host.invalid:1", {"node_lost"}),
        ("ipc://" + "x" * 500, {"node_lost"}),
        ("tcp://127.0.0.1:1", {"node_lost"}),
        ("tcp://[::1]:99999", {"node_lost"}),
    ],
)
def test_a_prefiller_that_is_not_there(cluster, endpoint, codes):
    layout = record_of(cluster, "decoder0").layout
    with Stranger(cluster, "decoder0") as stranger:
        stranger.say(assign(prefiller=Peer(ref=NodeRef("ghost", 5), endpoint=endpoint, layout=layout)))
        answer = stranger.hear_until("RequestFailed", "Finished")
        assert answer["type"] == "RequestFailed"
        assert (answer["error"]["node"], answer["error"]["code"]) == ("ghost", "node_lost"), answer
        assert answer["error"]["code"] in codes


def test_a_prefiller_of_another_layout_or_none(cluster):
    layout = record_of(cluster, "decoder0").layout
    other = [None, msgspec.structs.replace(layout, page_size=4), msgspec.structs.replace(layout, dtype="float16")]
    other.append(KVLayout(model="x", dtype="float32", layers=10**9, kv_heads=10**9, head_dim=10**9, page_size=10**9))
    for theirs in other:
        with Stranger(cluster, "decoder0") as stranger:
            stranger.say(assign(prefiller=Peer(ref=NodeRef("ghost", 5), endpoint="tcp://127.0.0.1:1", layout=theirs)))
            assert stranger.hear_until("RequestFailed")["error"]["code"] == "layout_mismatch"


def test_an_earlier_life_of_the_prefiller_is_told_apart(cluster):
    prefiller = record_of(cluster, "prefiller0")
    before = NodeRef("prefiller0", prefiller.ref.incarnation + 2)
    with Stranger(cluster, "decoder0") as stranger:
        stranger.say(assign(prefiller=Peer(ref=before, endpoint=prefiller.endpoint, layout=prefiller.layout)))
        error = stranger.hear_until("RequestFailed")["error"]
    assert (error["code"], error["node"]) == ("stale_incarnation", "prefiller0")


def test_a_prefiller_that_talks_nonsense_fails_its_own_requests_alone(cluster):
    layout = record_of(cluster, "decoder0").layout
    living = record_of(cluster, "prefiller0").ref
    with Impostor(ref=living) as ghost, in_the_name_of("router", cluster, "decoder0") as router:
        router.say(assign(prefiller=Peer(ref=ghost.ref, endpoint=ghost.endpoint, layout=layout)))
        body = ghost.hear()[0]["body"]
        names = {"request_id": "hostile", "slot": body["slot"], "generation": body["generation"]}
        ghost.parts(b"garbage")
        ghost.parts(b"{}", b"1")
        other = names | {"generation": (body["generation"] + 1) % 1024}
        ghost.say(CancelConfirmed(**other))
        ghost.say(CancelConfirmed(**(names | {"slot": -5})))
        ghost.say(PrefillReport(**(names | {"request_id": "other"}), timeline=PrefillTimeline()))
        # Before any page has come: checksums of pages that never were.
        ghost.say(PrefillReport(**names, timeline=PrefillTimeline(), checksums=Int32s(range(7))))
        error = {"code": "overloaded", "message": "full", "phase": "prefill", "node": "ghost"}
        ghost.say(PrefillFailed(**names, error=msgspec.convert(error, PrefillFailed.__annotations__["error"])))
        answer = router.hear_until("RequestFailed", "Finished")
        assert (answer["type"], answer["error"]["message"]) == ("RequestFailed", "full")


def test_cancels_and_reports_of_strangers_touch_nothing(cluster):
    with in_the_name_of("router", cluster, "decoder0") as router, Stranger(cluster, "decoder0", "other") as other:
        with cluster.slow_motion("decoder0"):
            router.say(assign(sampling=SamplingParams(max_tokens=150, ignore_eos=True)))
            assert router.hear()["type"] == "Accepted"
            other.say(Cancel(request_id="hostile"))
            other.say(Cancel(request_id="never heard of"))
            other.say(PrefillReport(request_id="hostile", slot=0, generation=1, timeline=PrefillTimeline()))
            assert other.hear()["reason"] == "type"
        assert router.hear_until("Finished", "Cancelled")["type"] == "Finished"
    with Stranger(cluster, "router") as client:
        client.say(CancelGenerate(id="never heard of"))
        assert client.nothing_heard()


def test_a_router_that_leaves_without_a_word_is_noticed(cluster):
    with cluster.slow_motion("decoder0"):
        with in_the_name_of("router", cluster, "decoder0") as router:
            for number in range(5):
                sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
                router.say(assign(request_id=f"left {number}", sampling=sampling))
            router.hear_until("Tokens")
        cluster.wait_idle()


# --- the router's ZeroMQ front -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "bad_request"),
        ({"prompt": "a", "prompt_ids": Int32s([1])}, "bad_request"),
        ({"prompt": ""}, "bad_request"),
        ({"prompt_ids": Int32s()}, "bad_request"),
        ({"prompt_ids": Int32s([-1])}, "bad_request"),
        ({"prompt_ids": Int32s([49152])}, "bad_request"),
        ({"prompt_ids": Int32s([5] * 100_000)}, "prompt_too_long"),
        ({"messages": []}, "bad_request"),
        ({"prompt": "a", "model": "other"}, "model_not_found"),
    ],
)
def test_a_hostile_generate_is_told_so(cluster, fields, code):
    with Stranger(cluster, "router") as client:
        client.say(Generate(id="a", **fields))
        answer = client.hear()
    assert (answer["type"], answer["error"]["code"]) == ("Failed", code)


def test_a_generate_whose_error_would_be_larger_than_a_message(cluster):
    with Stranger(cluster, "router") as client:
        client.say(Generate(id="a", prompt="a", model="\n" * 500_000))
        answer = client.hear()
        assert (answer["type"], answer["error"]["code"]) == ("Failed", "model_not_found")


# --- HTTP ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"prompt": "a", "tools": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
        b'{"prompt": "a", "max_tokens": 1e400}',
        b'{"prompt": "a", "max_tokens": 99999999999999999999999}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": [99999999999999999999999]}',
        b'{"prompt": [1, "a", [2]]}',
        b'{"prompt": [true]}',
        b'{"prompt": [[]]}',
        b'{"prompt": []}',
        b'{"prompt": "a", "model": "' + b"x" * 1_000_000 + b'"}',
        b'{"prompt": "a", "n": 2}',
        b'{"prompt": "a", "stop": ["' + b"x" * 1000 + b'"]}',
    ],
)
async def test_http_bodies_of_garbage(cluster, body):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=20) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x", "\xff"):
                headers = {b"content-type": kind.encode("latin-1")}
                reply = await client.post(path, content=body, headers=headers)
                assert 400 <= reply.status_code < 500, reply.text[:300]
                assert reply.json()["error"]["message"]


async def test_http_bodies_that_are_too_large(cluster):
    async def pieces():
        for _ in range(20):
            yield b"x" * MIB

    async with httpx.AsyncClient(base_url=cluster.url, timeout=20) as client:
        for content in (b"x" * 20 * MIB, pieces()):
            try:
                reply = await client.post("/v1/completions", content=content)
            except httpx.TransportError:
                # The answer came, and the connection ended, before all was sent.
                continue
            assert reply.status_code == 413
        assert (await client.get("/health")).status_code == 200


def connect(cluster):
    return socket.create_connection(("127.0.0.1", cluster["router"].http_port), timeout=20)


REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def request(**fields):
    body = json.dumps({"prompt": prompt(41), "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields).encode()
    return REQUEST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_http_bytes_of_garbage(cluster):
    draw = random.Random(7)
    for raw in (b"\0" * 100, draw.randbytes(5000), b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000, b"\r\n" * 1000):
        with connect(cluster) as wire:
            wire.settimeout(2)
            wire.sendall(raw)
            try:
                assert wire.recv(100).startswith((b"HTTP/1.1 4", b""))
            except (TimeoutError, ConnectionError):
                continue


def test_http_clients_that_are_slow_or_leave_in_the_middle_of_their_body(cluster):
    whole = request()
    waiting = [connect(cluster) for _ in range(20)]
    for index, wire in enumerate(waiting):
        wire.sendall(whole[: 10 + index * 8])
    slow = connect(cluster)
    for start in range(0, len(whole), 40):
        slow.sendall(whole[start : start + 40])
    assert slow.recv(12) == b"HTTP/1.1 200"
    for wire in (slow, *waiting):
        wire.close()


def test_http_half_closed_connections_are_answered_or_ended(cluster):
    with connect(cluster) as wire:
        wire.sendall(request())
        wire.shutdown(socket.SHUT_WR)
        received = wire.recv(1 << 16)
    assert received == b"" or received.startswith(b"HTTP/1.1 200")


def test_http_connections_that_are_reset(cluster):
    for _ in range(20):
        with connect(cluster) as wire:
            wire.sendall(request(max_tokens=1000, stream=True))
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_reader_of_a_stream_that_never_reads_holds_up_nobody(cluster):
    with connect(cluster) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.sendall(request(max_tokens=1000, stream=True, logprobs=20, return_token_ids=True))
        assert cluster.golden.ask(41) == cluster.golden.answers[41]
        wait_for(lambda: not cluster["decoder0"].held(), 150, "the decoder is through with it")
