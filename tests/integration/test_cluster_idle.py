"""After hundreds of requests, a third of them cancelled at random moments, nobody holds anything."""

import asyncio
import random

import httpx
from cluster import Cluster, wait_for

REQUESTS = 300
AT_ONCE = 16


async def ask(client, draw):
    """One request; a third are given up at a random moment, some of them before the first byte."""
    body = {
        "prompt": [draw.randrange(100, 40_000) for _ in range(draw.choice([1, 2, 8, 9, 33, 40, 100, 250]))],
        "max_tokens": draw.choice([1, 2, 8, 24]),
        "temperature": draw.choice([0, 1]),
        "stream": draw.random() < 0.5,
        "ignore_eos": True,
    }
    patience = draw.expovariate(8) if draw.random() < 1 / 3 else 100
    try:
        async with asyncio.timeout(patience):
            reply = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return "cancelled"
    assert reply.status_code == 200, reply.text
    assert '"error":' not in reply.text
    return "answered"


async def crowd(url, requests, seed):
    draw = random.Random(seed)
    places = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)

    async def one(client, number):
        async with places:
            return await ask(client, random.Random(f"{seed}.{number}"))

    async with httpx.AsyncClient(base_url=url, timeout=100, limits=limits) as client:
        outcomes = await asyncio.gather(*(one(client, draw.random()) for _ in range(requests)))
    return {outcome: outcomes.count(outcome) for outcome in set(outcomes)}


def resources(cluster):
    return {name: {what: node.resources()[what] for what in ("threads", "fds")} for name, node in cluster.nodes.items()}


async def test_nothing_is_held_after_hundreds_of_requests(tmp_path, tiny_model):
    worker = ["--dtype", "float32", "--kv-memory", "4MiB", "--page-size", "8"]
    decoder = ["--local-prefill-tokens", "8", "--max-running", "8"]
    with Cluster(tmp_path, tiny_model, decoders=2, worker=worker, decoder=decoder) as cluster:
        await crowd(cluster.url, 40, seed=1)
        cluster.wait_idle()
        before = resources(cluster)
        outcomes = await crowd(cluster.url, REQUESTS, seed=2)
        assert sum(outcomes.values()) == REQUESTS
        assert outcomes.get("cancelled", 0) >= 10
        cluster.wait_idle()

        def as_before():
            now = resources(cluster)
            return all(now[name][what] <= before[name][what] for name in now for what in now[name])

        wait_for(as_before, 20, lambda: (before, resources(cluster)))
        for node in cluster.workers:
            pages = node.state()["pages"]
            assert (pages["held"], pages["quarantined"]) == (0, 0)
