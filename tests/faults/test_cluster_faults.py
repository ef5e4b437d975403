"""Processes killed, stopped and restarted under load: streams go on, errors say who, and nothing stays held.

One cluster serves all tests: each begins by starting again what the one before it has ended.
"""

import asyncio
import itertools
import math
import signal
import time
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest
import redis
from cluster import START_SECONDS, Cluster, wait_for
from streams import Golden, Stream, prompt

pytestmark = pytest.mark.faults

LEASE = 5.0
"""Seconds. A node that a busy machine lets stand still for longer gives up what it has, as it should."""
COMMON = ["--lease-seconds", str(LEASE), "--heartbeat-seconds", "0.3"]
WORKER = ["--dtype", "float32", "--kv-memory", "4MiB", "--page-size", "8"]
PREFILLER = ["--chunk-size", "32"]
# What its last decoder had is given up a second after that is gone.
ROUTER = ["--recovery-seconds", "1"]
DECODER = ["--local-prefill-tokens", "8", "--cancel-retry-seconds", "0.3"]
DECODERS = ("decoder0", "decoder1")
LEFT = "kvferry_transfers_total"
"""Of a prefiller: pieces of prompts that have left."""
ANSWER = 250
PASSAGE = 300
AT_ONCE = 40
"""Seconds: a bound for a slow machine. A timeout of the services' own would be longer."""
SAMPLED = {"temperature": 1, "top_k": 4, "seed": 11}
"""Few candidates, so that a difference in the last bit of a logit draws the same token."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory, tiny_model):
    with Cluster(
        tmp_path_factory.mktemp("faults"),
        tiny_model,
        prefillers=2,
        decoders=2,
        common=COMMON,
        worker=WORKER,
        prefiller=PREFILLER,
        decoder=DECODER,
        router=ROUTER,
    ) as cluster:
        cluster.golden = Golden(cluster)
        yield cluster
        heal(cluster)


@pytest.fixture
def cluster(shared):
    heal(shared)
    return shared


def heal(cluster, *names):
    """Start what has ended, and wait until the router sees all; a test that failed may have left anything."""
    if not cluster.told():
        cluster.stop_redis()
        cluster.start_redis()
    nodes = [cluster[name] for name in names] or list(cluster.nodes.values())
    for node in nodes:
        node.signal(signal.SIGCONT)
    ended = [node for node in nodes if node.process.poll() is not None]
    for node in ended:
        node.start()
    for node in ended:
        wait_for(node.ready, START_SECONDS, lambda node=node: f"{node.name} ready:\n{node.tail()}")
    cluster.wait_seen()


def wait_seen_by_router(cluster, **counts):
    def seen():
        state = cluster["router"].state()
        return all(state[name] == count for name, count in counts.items())

    wait_for(seen, 60, lambda: (counts, cluster["router"].state()))


def metric(node, name):
    return sum(float(line.split()[-1]) for line in node.metrics().splitlines() if line.startswith(name))


def streams(cluster, count=4):
    """Streams of which every second one draws at random."""
    fields = [{}, SAMPLED]
    return [Stream(cluster.url, prompt(40, i), ANSWER, **fields[i % 2]) for i in range(count)]


async def undisturbed(cluster):
    """What the streams and the passages answer while all is well, asked once."""
    if not hasattr(cluster, "undisturbed"):
        cluster.undisturbed = [await stream.end() for stream in streams(cluster)], ids(await passages(cluster))
    return cluster.undisturbed


@asynccontextmanager
async def under_way(cluster, count=4):
    """Streams in the midst of their answers, as many on each decoder; for as long as the block runs they crawl."""
    await asyncio.to_thread(cluster.settle)
    with cluster.slow_motion(*DECODERS):
        running = streams(cluster, count)
        for stream in running:
            await stream.until(3)
        assert not any(stream.task.done() for stream in running)
        yield running


_SALTS = itertools.count()


async def ask(cluster, what, **fields):
    """Ask anew: nothing of it is cached, so that a prefiller has to do with it each time."""
    fields = {"cache_salt": f"ask {next(_SALTS)}"} | fields
    body = {"prompt": what, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        return await client.post("/v1/completions", json=body)


async def passages(cluster, count=4):
    """Long prompts at once."""
    return await asyncio.gather(*(ask(cluster, prompt(PASSAGE, seed)) for seed in range(count)))


def ids(replies):
    assert [reply.status_code for reply in replies] == [200] * len(replies), [reply.text for reply in replies]
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]


@asynccontextmanager
async def prefilling(cluster):
    """Passages in the midst of being prefilled, some of whose pages have left; as long as the block runs they stay so.

    Every prefiller has some, and so has every decoder. Yields the task that has asked for them.
    """
    nodes = [node for node in cluster.alive if node.role == "prefiller"]
    before = {node.name: metric(node, LEFT) for node in nodes}

    def midst():
        return all(node.state()["requests"]["running"] and metric(node, LEFT) > before[node.name] for node in nodes)

    with cluster.slow_motion(*before, step=math.inf, free=1):
        asked = asyncio.create_task(passages(cluster))
        await asyncio.to_thread(wait_for, midst, 60, "prefilling")
        yield asked


async def test_a_decoder_killed_mid_stream_costs_neither_a_token_nor_a_repeat(cluster):
    expected, _ = await undisturbed(cluster)
    retried = metric(cluster["router"], "kvferry_retries_total")
    async with under_way(cluster) as running:
        cluster["decoder0"].kill()
    assert [await stream.end() for stream in running] == expected
    assert metric(cluster["router"], "kvferry_retries_total") > retried
    heal(cluster)
    cluster.golden.check()


async def test_a_decoder_that_drains_ends_its_streams_and_without_any_it_is_said_at_once(cluster):
    expected, _ = await undisturbed(cluster)
    router = cluster["router"]
    retried = metric(router, "kvferry_retries_total")
    async with under_way(cluster) as running:
        assert cluster["decoder1"].state()["requests"]["running"]
        stopping = await draining(cluster["decoder1"])
    assert await stopping == 0
    assert [await stream.end() for stream in running] == expected
    assert metric(router, "kvferry_retries_total") == retried
    await no_decoder(cluster)
    heal(cluster, "decoder0", "decoder1")
    assert await get(cluster, "/ready") == (200, None)
    cluster.golden.check()


async def draining(node):
    """Ask a node to end, and see that it drains; returns the task that waits for its status."""
    stopping = asyncio.create_task(asyncio.to_thread(node.stop))
    await asyncio.to_thread(wait_for, lambda: not node.ready(), 60, f"{node.name} drains")
    return stopping


async def no_decoder(cluster):
    """Kill the last decoder: what ran, and what comes then, is told so, fast and with the right words."""
    async with under_way(cluster, count=2) as running:
        cluster["decoder0"].kill()
        error = await refused(cluster)
        assert error["code"] in {"node_lost", "no_nodes"}
        for stream in running:
            await asyncio.wait_for(stream.task, AT_ONCE)
    for stream in running:
        assert (stream.error["code"], stream.error["node"]) == ("node_lost", "decoder0")
    wait_seen_by_router(cluster, decoders=0)
    assert await get(cluster, "/ready") == (503, "no decoder is up")
    assert (await refused(cluster))["code"] == "no_nodes"


async def refused(cluster, length=40):
    """Ask; the answer is a 503 with Retry-After, and doesn't let the client wait."""
    began = time.monotonic()
    reply = await ask(cluster, prompt(length))
    assert time.monotonic() - began < AT_ONCE
    assert reply.status_code == 503, reply.text
    assert int(reply.headers["retry-after"]) >= 1
    return reply.json()["error"]


async def get(cluster, path):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=10) as client:
        reply = await client.get(path)
    return reply.status_code, reply.json().get("reason")


async def test_the_last_decoder_killed_mid_stream_and_restarted_costs_neither_a_token_nor_a_repeat(cluster):
    expected, _ = await undisturbed(cluster)
    with router_flags(cluster, "--recovery-seconds", str(2 * START_SECONDS)):
        assert await asyncio.to_thread(cluster["decoder1"].stop) == 0
        wait_seen_by_router(cluster, decoders=1)
        async with under_way(cluster) as running:
            cluster["decoder0"].kill()
            await asyncio.to_thread(wait_for, lambda: cluster["router"].held().get("waiting") == 4, 60, "all wait")
        await asyncio.to_thread(heal, cluster, "decoder0")
        assert [await stream.end() for stream in running] == expected
    heal(cluster)
    cluster.golden.check()


@contextmanager
def router_flags(cluster, *flags):
    """Run the router with further flags; afterwards whoever needs it starts it again without."""
    router = cluster["router"]
    usual, router.flags = router.flags, [*router.flags, *flags]
    try:
        router.stop()
        heal(cluster, "router")
        yield
    finally:
        router.flags = usual
        router.stop()


async def test_a_decoder_frozen_mid_stream_for_longer_than_its_lease_comes_back(cluster):
    expected, _ = await undisturbed(cluster)
    async with under_way(cluster) as running:
        cluster["decoder0"].signal(signal.SIGSTOP)
    assert [await stream.end() for stream in running] == expected
    wait_seen_by_router(cluster, decoders=1)
    cluster["decoder0"].signal(signal.SIGCONT)
    wait_seen_by_router(cluster, decoders=2)
    await asyncio.to_thread(cluster.settle)
    drawn = metric(cluster["decoder0"], "kvferry_tokens_total")
    assert [await stream.end() for stream in streams(cluster)] == expected
    assert metric(cluster["decoder0"], "kvferry_tokens_total") > drawn
    cluster.golden.check()


async def test_a_decoder_frozen_while_its_pages_come_lets_go_of_them_afterwards(cluster):
    _, expected = await undisturbed(cluster)
    await asyncio.to_thread(cluster.settle)
    async with prefilling(cluster) as asked:
        for name in DECODERS:
            assert cluster[name].state()["requests"]["receiving"]
        cluster["decoder0"].signal(signal.SIGSTOP)
    assert ids(await asked) == expected
    wait_seen_by_router(cluster, decoders=1)
    cluster["decoder0"].signal(signal.SIGCONT)
    wait_seen_by_router(cluster, decoders=2)
    cluster.wait_idle()
    assert ids(await passages(cluster)) == expected
    cluster.golden.check()


async def test_prefillers_killed_at_work_are_replaced_by_another_and_the_last_by_decoders(cluster):
    _, expected = await undisturbed(cluster)
    await asyncio.to_thread(cluster.settle)
    async with prefilling(cluster) as asked:
        cluster["prefiller0"].kill()
    assert ids(await asked) == expected
    await asyncio.to_thread(cluster.settle)
    async with prefilling(cluster) as asked:
        cluster["prefiller1"].kill()
    assert ids(await asked) == expected
    wait_seen_by_router(cluster, prefillers=0)
    assert ids(await passages(cluster)) == expected
    heal(cluster)
    cluster.golden.check()


async def test_a_prefiller_frozen_for_longer_than_its_lease_writes_into_nobodys_pages(cluster):
    expected, long = await undisturbed(cluster)
    await asyncio.to_thread(cluster.settle)
    async with prefilling(cluster) as asked:
        cluster["prefiller0"].signal(signal.SIGSTOP)
    assert ids(await asked) == long
    # Other requests have the pages by now that it still means to write.
    async with under_way(cluster) as running:
        cluster["prefiller0"].signal(signal.SIGCONT)
        wait_seen_by_router(cluster, prefillers=2)
    assert [await stream.end() for stream in running] == expected
    cluster.wait_idle()
    assert ids(await passages(cluster)) == long
    cluster.golden.check()


async def test_a_prefiller_drains_and_the_last_one_killed_fails_its_requests_by_name_until_it_is_back(cluster):
    _, expected = await undisturbed(cluster)
    router = cluster["router"]
    retried = metric(router, "kvferry_retries_total")
    begun = admitted_by_prefillers(cluster)
    await asyncio.to_thread(cluster.settle)
    async with prefilling(cluster) as asked:
        # Whoever is asked only after it has begun to drain refuses, which is a retry and as it should be.
        await asyncio.to_thread(wait_for, lambda: admitted_by_prefillers(cluster) == begun + 4, 60, "all are asked")
        stopping = await draining(cluster["prefiller1"])
    assert await stopping == 0
    assert ids(await asked) == expected
    assert metric(router, "kvferry_retries_total") == retried
    with router_flags(cluster, "--no-local-prefill"):
        await no_prefiller(cluster)
        heal(cluster, "prefiller0")
        assert ids(await passages(cluster)) == expected
    heal(cluster)
    cluster.golden.check()


def admitted_by_prefillers(cluster):
    """Prompts that prefillers were asked for since they started."""
    name = 'kvferry_messages_total{direction="in",type="Prefill"}'
    return sum(metric(cluster[node], name) for node in ("prefiller0", "prefiller1"))


async def no_prefiller(cluster):
    """Kill the last prefiller, where decoders may not prefill by themselves."""
    await asyncio.to_thread(cluster.settle)
    async with prefilling(cluster) as asked:
        cluster["prefiller0"].kill()
        replies = await asyncio.wait_for(asked, AT_ONCE)
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["node"]) == (503, "node_lost", "prefiller0"), error
        assert "prefiller0" in error["message"]
        assert error["phase"] in {"prefill", "transfer"}
    wait_seen_by_router(cluster, prefillers=0)
    status, reason = await get(cluster, "/ready")
    assert status == 503
    assert "no prefiller" in reason
    assert (await refused(cluster, PASSAGE))["code"] == "no_nodes"
    wait_for(lambda: not any(cluster[name].held() for name in (*DECODERS, "router")), 60, "idle")


async def test_a_router_killed_and_restarted_leaves_nothing_running(cluster):
    async with under_way(cluster) as running, prefilling(cluster) as asked:
        cluster["router"].kill()
    for outcome in await asyncio.gather(*(stream.task for stream in running), asked, return_exceptions=True):
        assert isinstance(outcome, httpx.TransportError)
    heal(cluster)
    cluster.golden.check()


async def test_redis_stopped_for_longer_than_two_leases_costs_no_request(cluster):
    before = {name: node.process.pid for name, node in cluster.nodes.items()}
    expected, long = await undisturbed(cluster)
    retried = metric(cluster["router"], "kvferry_retries_total")
    async with under_way(cluster) as running:
        cluster.stop_redis()
        until = time.monotonic() + 2.5 * LEASE
        while time.monotonic() < until:
            assert ids(await passages(cluster, 1)) == long[:1]
    assert [await stream.end() for stream in running] == expected
    assert not cluster["router"].state()["redis"]
    cluster.start_redis()
    cluster.wait_seen()
    await asyncio.sleep(2 * LEASE)
    assert metric(cluster["router"], "kvferry_retries_total") == retried
    assert {name: node.process.pid for name, node in cluster.nodes.items()} == before
    cluster.golden.check()


async def test_redis_flushed_under_load_costs_no_request(cluster):
    expected, long = await undisturbed(cluster)
    retried = metric(cluster["router"], "kvferry_retries_total")
    async with under_way(cluster) as running:
        asked = asyncio.create_task(passages(cluster))
        with redis.Redis.from_url(cluster.redis_url) as client:
            for _ in range(4):
                client.flushall()
                client.script_flush()
                await asyncio.sleep(0.3 * LEASE)
    assert [await stream.end() for stream in running] == expected
    assert ids(await asked) == long
    cluster.wait_seen()
    assert metric(cluster["router"], "kvferry_retries_total") == retried
    cluster.golden.check()


async def test_a_router_frozen_for_longer_than_its_lease_goes_on_where_it_was(cluster):
    """Decoders drop what a lost router wanted; one that comes back asks again, and its client misses nothing."""
    undisturbed = await Stream(cluster.url, prompt(PASSAGE), ANSWER).end()
    with cluster.slow_motion(*DECODERS):
        stream = Stream(cluster.url, prompt(PASSAGE), ANSWER)
        await stream.until(3)
        cluster["router"].signal(signal.SIGSTOP)
        await asyncio.to_thread(wait_for, lambda: "router" not in cluster.told(), 60, "the end of its lease")
        dropped = lambda: not any(cluster[name].held() for name in DECODERS)  # noqa: E731
        await asyncio.to_thread(wait_for, dropped, 60, "the decoders have dropped it")
        cluster["router"].signal(signal.SIGCONT)
    assert await stream.end() == undisturbed
    cluster.golden.check()
