"""Placement in Redis: spread without stampede, reservations that end, and the same choice as in Python."""

import asyncio
import collections
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from kvferry_node.choose import Candidate, Choice, PlacementAsk, Unplaced, choose
from kvferry_node.membership import MembershipView
from kvferry_node.placement import Placement, Placer
from kvferry_node.registry import Registry
from kvferry_proto.errors import ErrorCode, KvferryError
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role, new_incarnation

pytestmark = pytest.mark.usefixtures("nothing_left")

LAYOUT = KVLayout(model="f", dtype="float32", layers=2, kv_heads=4, head_dim=8, page_size=16)


def record(node_id: str, role: Role = Role.DECODER, **fields: Any) -> NodeRecord:
    given: dict[str, Any] = {"layout": LAYOUT, "provider": "tcp", "total_pages": 100, "model": "m"} | fields
    return NodeRecord(ref=NodeRef(node_id, new_incarnation()), role=role, endpoint="tcp://127.0.0.1:1", **given)


def ask(number: int = 0, **fields: Any) -> PlacementAsk:
    return PlacementAsk(**({"request_id": f"r{number}", "tokens": 65, "pages": 5, "model": "m"} | fields))


class Cluster:
    """Nodes written to Redis by the script that nodes use, without a heart that beats."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.view = MembershipView(url, "t")
        self.view.available = True  # nobody follows the cluster in these tests
        self.placer = Placer(url, "t", self.view, node="router-1", reserve_seconds=30)

    async def add(self, what: NodeRecord, load: Load | None = None, admitted: list[str] | None = None) -> NodeRecord:
        registry = Registry(self.url, "t", what, lease_seconds=60)
        registry._admitted.extend(admitted or [])
        await registry._renew(load, takeover=True)
        await registry.close()
        return what

    async def error(self, what: PlacementAsk) -> KvferryError:
        with pytest.raises(KvferryError) as caught:
            await self.placer.place(what)
        assert caught.value.error.node == "router-1"
        return caught.value


@pytest.fixture
async def cluster(redis_server: Any) -> AsyncIterator[Cluster]:
    it = Cluster(redis_server.url)
    yield it
    await it.placer.close()
    await it.view.close()


def held(redis_server: Any, what: NodeRecord) -> dict[str, str]:
    return redis_server.command("HGETALL", f"t:held:{what.ref.id}:{what.ref.incarnation:x}")


async def test_200_at_once_spread_evenly_and_reserve_no_more_than_there_is(cluster, redis_server):
    prefillers = [await cluster.add(record(f"p{n}", Role.PREFILLER), Load()) for n in range(2)]
    decoders = [await cluster.add(record(f"d{n}", total_pages=250), Load(free_pages=250)) for n in range(4)]
    other = Placer(redis_server.url, "t", cluster.view)
    placers = [cluster.placer, other]
    placed = await asyncio.gather(*(placers[n % 2].place(ask(n)) for n in range(200)))
    assert collections.Counter(p.decoder.ref.id for p in placed) == {f"d{n}": 50 for n in range(4)}
    assert collections.Counter(p.prefiller.ref.id for p in placed) == {"p0": 100, "p1": 100}
    for decoder in decoders:
        pages = [int(value.split()[1]) for value in held(redis_server, decoder).values()]
        assert sum(pages) == 250
    for prefiller in prefillers:
        assert sum(int(value.split()[2]) for value in held(redis_server, prefiller).values()) == 6400
    full = await cluster.error(ask(200))
    assert full.error.code == ErrorCode.OVERLOADED
    assert full.error.retry_after
    await asyncio.gather(*(cluster.placer.release(p) for p in placed))
    assert all(held(redis_server, node) == {} for node in (*decoders, *prefillers))
    await other.close()


async def test_placement_is_one_call_and_survives_a_script_flush(cluster, redis_server):
    await cluster.add(record("d1"), Load(free_pages=100))
    await cluster.placer.place(ask(1, tokens=1))
    redis_server.command("SCRIPT", "FLUSH")
    await cluster.placer.place(ask(2, tokens=1))
    redis_server.command("CONFIG", "RESETSTAT")
    await cluster.placer.place(ask(3, tokens=1))
    assert redis_server.command("INFO", "commandstats")["cmdstat_evalsha"]["calls"] == 1


async def test_expired_reservation_is_free_again(cluster, redis_server, eventually):
    what = await cluster.add(record("d1"), Load(free_pages=5))
    await cluster.placer.place(ask(1, tokens=1))
    assert (await cluster.error(ask(2, tokens=1))).error.code == ErrorCode.OVERLOADED
    hasty = Placer(redis_server.url, "t", cluster.view, reserve_seconds=0.05)
    await hasty.place(ask(1, tokens=1))
    await eventually(lambda: held(redis_server, what) == {})
    await cluster.placer.place(ask(3, tokens=1))
    assert list(held(redis_server, what)) == ["r3"]
    await hasty.close()


async def test_one_expired_among_living_reservations_is_dropped(cluster, redis_server):
    what = await cluster.add(record("d1"), Load(free_pages=10))
    await cluster.placer.place(ask(1, tokens=1))
    redis_server.command("HSET", f"t:held:d1:{what.ref.incarnation:x}", "old", "1000 5 0", "torn", "nonsense")
    await cluster.placer.place(ask(2, tokens=1))
    assert set(held(redis_server, what)) == {"r1", "r2"}


async def test_release_is_idempotent_and_frees_only_its_own(cluster, redis_server):
    prefiller = await cluster.add(record("p1", Role.PREFILLER), Load())
    decoder = await cluster.add(record("d1"), Load(free_pages=100))
    first, second = await cluster.placer.place(ask(1)), await cluster.placer.place(ask(2))
    for _ in range(3):
        await cluster.placer.release(first)
    assert set(held(redis_server, decoder)) == set(held(redis_server, prefiller)) == {"r2"}
    await cluster.placer.release(second)
    assert redis_server.command("KEYS", "t:held:*") == []


async def test_admitted_requests_give_their_reservations_to_the_load(cluster, redis_server):
    what = await cluster.add(record("d1"), Load(free_pages=10))
    await cluster.placer.place(ask(1, tokens=1))
    await cluster.placer.place(ask(2, tokens=1))
    await cluster.add(what, Load(free_pages=5, running=1), admitted=["r1"])
    assert set(held(redis_server, what)) == {"r2"}
    assert (await cluster.error(ask(3, tokens=1))).error.code == ErrorCode.OVERLOADED


async def test_asking_again_for_the_same_request_replaces_its_reservation(cluster, redis_server):
    what = await cluster.add(record("d1"), Load(free_pages=5))
    await cluster.placer.place(ask(1, tokens=1))
    await cluster.placer.place(ask(1, tokens=1))
    assert set(held(redis_server, what)) == {"r1"}


async def test_node_without_load_is_not_placed_on_and_breaks_nothing(cluster, redis_server):
    await cluster.add(record("d1"))
    assert (await cluster.error(ask(1, tokens=1))).error.code == ErrorCode.OVERLOADED
    redis_server.command("HSET", "t:nodes", "empty", "1", "torn", "2", "expired", "3")
    redis_server.command("HSET", "t:node:empty", "x", "y")
    torn = {"incarnation": "2", "record": "{}", "role": "decoder", "model": "m", "free_pages": "many", "running": ""}
    redis_server.command("HSET", "t:node:torn", *(part for pair in torn.items() for part in pair))
    await cluster.add(record("d2"), Load(free_pages=10))
    assert (await cluster.placer.place(ask(1, tokens=1))).decoder.ref.id == "d2"


async def test_errors_name_the_missing_role_and_the_numbers(cluster):
    error = (await cluster.error(ask(1))).error
    assert (error.code, error.status) == (ErrorCode.NO_NODES, 503)
    assert "no decoder of model 'm'" in error.message
    await cluster.add(record("d1"), Load(free_pages=100))
    assert "no prefiller" in (await cluster.error(ask(1))).error.message
    assert (await cluster.placer.place(ask(1, local_prefill=True))).prefiller is None
    assert (await cluster.error(ask(2, model="other"))).error.code == ErrorCode.NO_NODES
    large = (await cluster.error(ask(2, pages=101))).error
    assert large.code == ErrorCode.PROMPT_TOO_LONG
    assert "101" in large.message
    assert "100" in large.message


async def test_short_prompts_need_no_prefiller(cluster):
    await cluster.add(record("d1", local_prefill_tokens=10), Load(free_pages=100))
    for tokens in (1, 11):
        assert (await cluster.placer.place(ask(tokens, tokens=tokens))).prefiller is None
    assert (await cluster.error(ask(12, tokens=12))).error.code == ErrorCode.NO_NODES


async def test_prefiller_must_pair_with_the_decoder(cluster):
    other = msgspec.structs.replace(LAYOUT, page_size=32)
    await cluster.add(record("d1"), Load(free_pages=100))
    await cluster.add(record("d2", layout=other), Load(free_pages=100, running=3))
    await cluster.add(record("p1", Role.PREFILLER, provider="shm"), Load())
    assert (await cluster.error(ask(1))).error.code == ErrorCode.NO_NODES
    await cluster.add(record("p2", Role.PREFILLER, layout=other), Load(queued_tokens=10**6))
    placed = await cluster.placer.place(ask(2))
    assert placed.prefiller is not None
    assert (placed.decoder.ref.id, placed.prefiller.ref.id) == ("d2", "p2")


async def test_draining_and_excluded_nodes_are_left_out(cluster):
    await cluster.add(record("d1", draining=True), Load(free_pages=100))
    failed = await cluster.add(record("d2"), Load(free_pages=100))
    await cluster.add(record("d3"), Load(free_pages=100, running=9))
    assert (await cluster.placer.place(ask(1, tokens=1))).decoder.ref.id == "d2"
    placed = await cluster.placer.place(ask(2, tokens=1, exclude=frozenset({failed.ref})))
    assert placed.decoder.ref.id == "d3"


async def test_a_node_that_was_restarted_since_it_failed_is_not_left_out(cluster):
    failed = [
        await cluster.add(record("p1", Role.PREFILLER), Load()),
        await cluster.add(record("d1"), Load(free_pages=100)),
    ]
    wanted = ask(1, exclude=frozenset(node.ref for node in failed))
    assert (await cluster.error(wanted)).error.code == ErrorCode.NO_NODES
    prefiller = await cluster.add(record("p1", Role.PREFILLER), Load())
    decoder = await cluster.add(record("d1"), Load(free_pages=100))
    placed = await cluster.placer.place(wanted)
    assert (placed.decoder, placed.prefiller) == (decoder, prefiller)


async def test_a_prompt_goes_to_who_holds_it_unless_that_one_is_much_busier(cluster):
    wanted = {"tokens": 100, "affinity": 4.0, "held": {"d2": 100, "p2": 100}}
    for number in (1, 2):
        await cluster.add(record(f"p{number}", Role.PREFILLER), Load(queued_tokens=50 * number))
    for load, chosen in ((0, "d2"), (3, "d2"), (5, "d1")):
        await cluster.add(record("d1"), Load(free_pages=100))
        await cluster.add(record("d2"), Load(free_pages=100, running=load))
        placed = await cluster.placer.place(ask(1, **wanted))
        assert (placed.decoder.ref.id, placed.prefiller.ref.id) == (chosen, "p2")
    half = await cluster.placer.place(ask(1, **wanted | {"held": {"d2": 50}}))
    assert (half.decoder.ref.id, half.prefiller.ref.id) == ("d1", "p1")


async def test_a_prefiller_that_is_spared_gets_its_reservation_back(cluster, redis_server):
    prefiller = await cluster.add(record("p1", Role.PREFILLER), Load())
    decoder = await cluster.add(record("d1"), Load(free_pages=100))
    placed = await cluster.placer.place(ask(1))
    await cluster.placer.release(placed, decoder=False)
    assert (set(held(redis_server, decoder)), held(redis_server, prefiller)) == ({"r1"}, {})


async def test_incarnation_and_record_come_back_exactly(cluster):
    what = await cluster.add(record("d1", metrics="http://[::1]:1/ü\"'", max_context=1 << 40), Load(free_pages=100))
    assert await cluster.placer.place(ask(1, tokens=1)) == Placement(request_id="r1", decoder=what, prefiller=None)


async def test_the_script_chooses_as_python_does(cluster, redis_server):
    """A hundred random clusters: the rule exists twice and must be one."""
    rng = random.Random(11)
    outcomes: collections.Counter[str] = collections.Counter()
    for number in range(100):
        redis_server.command("FLUSHDB")
        nodes = [_random_node(rng, index) for index in range(rng.randint(0, 7))]
        for what, load in nodes:
            await cluster.add(what, load)
        reserved: dict[str, tuple[int, int, int]] = collections.defaultdict(lambda: (0, 0, 0))
        for turn in range(4):
            wanted = _random_ask(rng, 10 * number + turn, [what.ref for what, _ in nodes])
            expected = choose(wanted, [Candidate(what, load, *reserved[what.ref.id]) for what, load in nodes])
            got = await cluster.placer._ask_redis(wanted)
            assert got == expected
            outcomes[expected.why if isinstance(expected, Unplaced) else f"placed {bool(expected.prefiller)}"] += 1
            if isinstance(got, Choice):
                _reserve(reserved, got.decoder.ref.id, wanted.pages, 0)
                if got.prefiller is not None:
                    _reserve(reserved, got.prefiller.ref.id, 0, wanted.prefill_tokens)
    assert set(outcomes) == {"no_nodes", "overloaded", "too_large", "placed True", "placed False"}
    assert min(outcomes.values()) > 2, outcomes


def _reserve(reserved: dict[str, tuple[int, int, int]], node_id: str, pages: int, tokens: int) -> None:
    before = reserved[node_id]
    reserved[node_id] = (before[0] + 1, before[1] + pages, before[2] + tokens)


def _random_node(rng: random.Random, index: int) -> tuple[NodeRecord, Load]:
    total = rng.choice([20, 40])
    what = record(
        f"n{index}",
        rng.choice([Role.DECODER, Role.DECODER, Role.PREFILLER, Role.ROUTER]),
        provider=rng.choice(["tcp", "tcp", "shm"]),
        model=rng.choice(["m", "m", "m", "other"]),
        total_pages=total,
        max_running=rng.choice([0, 2, 4]),
        max_waiting=rng.choice([0, 2]),
        max_context=rng.choice([0, 100, 1000]),
        local_prefill_tokens=rng.choice([0, 0, 16]),
        draining=rng.random() < 0.1,
    )
    load = Load(
        free_pages=rng.randint(0, total),
        running=rng.randint(0, 3),
        waiting=rng.randint(0, 2),
        queued_tokens=rng.choice([0, 0, 100, 5000]),
    )
    return what, load


def _random_ask(rng: random.Random, number: int, present: list[NodeRef]) -> PlacementAsk:
    # A node's earlier life may have failed the request as well as its present one.
    lives = [*present, *(NodeRef(ref.id, new_incarnation()) for ref in present)]
    return ask(
        number,
        tokens=rng.choice([1, 2, 16, 17, 18, 300]),
        pages=rng.choice([1, 3, 10, 21, 41]),
        context=rng.choice([0, 100, 101, 1001]),
        exclude=frozenset(rng.sample(lives, min(len(lives), rng.choice([0, 0, 3])))),
        local_prefill=rng.random() < 0.3,
        held={f"n{n}": rng.choice([0, 7, 100, 299]) for n in rng.sample(range(7), rng.choice([0, 0, 2]))},
        affinity=rng.choice([0.0, 0.5, 4.0]),
    )
