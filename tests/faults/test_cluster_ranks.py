"""Ranks of a node die together, cost no token, and leave nothing; the node's next life is whole."""

import asyncio
import itertools
import math
import os
import re
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from cluster import Cluster, wait_for
from forge import Forge
from streams import Stream, prompt
from tokenizers import Tokenizer

pytestmark = pytest.mark.faults

COMMON = ["--heartbeat-seconds", "0.3"]
WORKER = ["--tp", "2", "--dtype", "float32", "--kv-memory", "4MiB", "--page-size", "8", "--provider", "tcp"]
# Waits that the tests themselves cause are no reason to let a prompt go first.
PREFILLER = ["--chunk-size", "32", "--overtake-seconds", "600"]
DECODER = ["--local-prefill-tokens", "8"]
DECODERS = ("decoder0", "decoder1")
ANSWER = 60
BOUND = "[a-z ]{2000}"
PASSAGE = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("ranks")
    flags = {"common": COMMON, "worker": WORKER, "prefiller": PREFILLER, "decoder": DECODER}
    with Cluster(folder, tiny_model, decoders=2, **flags) as cluster:
        yield cluster


def rank_of(node):
    return node.state()["ranks"]["1"]


def gone(pid):
    """Whether a process is over; one that nobody has waited for is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def heal(cluster):
    for node in cluster.workers:
        if node.process.poll() is not None:
            node.restart()
    cluster.wait_seen()


def streams(cluster):
    fields = [{}, {"temperature": 1, "top_k": 4, "seed": 11}, {"guided_regex": BOUND}]
    return [Stream(cluster.url, prompt(40, i), ANSWER, **fields[i % 3]) for i in range(4)]


@asynccontextmanager
async def under_way(cluster):
    """Streams in the midst of their answers, two on each decoder; for as long as the block runs they crawl."""
    await asyncio.to_thread(cluster.settle)
    with cluster.slow_motion(*DECODERS):
        running = streams(cluster)
        for stream in running:
            await stream.until(3)
        assert not any(stream.task.done() for stream in running)
        yield running


_salts = itertools.count()


async def ask(cluster):
    """One passage, anew each time: no page of it is cached under its salt."""
    body = {"prompt": prompt(PASSAGE), "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    body["cache_salt"] = f"salt-{next(_salts)}"
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        reply = await client.post("/v1/completions", json=body | {"ignore_eos": True})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def ended_by_its_rank(node, rank):
    """The lead has ended, said which rank was to blame, and nothing of it is left."""
    assert node.process.wait(60) == 1
    assert wait_for(lambda: gone(rank), 60, "the rank gone")
    (said,) = node.events("a rank is lost; its node ends")[-1:]
    assert said["why"] == f"rank 1 (process {rank}) ended by SIGKILL"


async def test_a_rank_of_a_decoder_killed_under_load_costs_no_token(cluster):
    expected = [await stream.end() for stream in streams(cluster)]
    # The lead draws for all ranks, and so it alone knows of the grammar.
    assert re.fullmatch("[a-z ]+", Tokenizer.from_file(f"{cluster.model}/tokenizer.json").decode(expected[2]))
    node = cluster["decoder0"]
    rank = rank_of(node)
    async with under_way(cluster) as running:
        assert node.state()["requests"]["running"]
        os.kill(rank, signal.SIGKILL)
    assert [await stream.end() for stream in running] == expected
    await asyncio.to_thread(ended_by_its_rank, node, rank)
    # As long as it is away, and when it is back: nobody sees an error.
    assert [await stream.end() for stream in streams(cluster)] == expected
    await asyncio.to_thread(heal, cluster)
    assert [await stream.end() for stream in streams(cluster)] == expected
    assert rank_of(node) != rank
    cluster.wait_idle()


async def test_a_rank_of_a_prefiller_killed_at_work_is_made_up_for(cluster):
    node = cluster["prefiller0"]
    expected = await ask(cluster)
    rank = rank_of(node)
    with cluster.slow_motion("prefiller0", step=math.inf, free=1):
        asked = asyncio.create_task(ask(cluster))
        await asyncio.to_thread(wait_for, lambda: node.state()["requests"]["running"], 60, "prefilling")
        os.kill(rank, signal.SIGKILL)
    assert await asked == expected
    await asyncio.to_thread(ended_by_its_rank, node, rank)
    await asyncio.to_thread(heal, cluster)
    assert await ask(cluster) == expected
    cluster.wait_idle()


async def test_one_long_document_does_not_hold_many_short_prompts(cluster):
    """A pass computes 32 tokens: the document takes 40 passes, all the others together 15."""
    node = cluster["prefiller0"]

    def has(count):
        return lambda: sum(node.state()["requests"].values()) == count

    with cluster.slow_motion("prefiller0", step=math.inf):
        document = Stream(cluster.url, prompt(1280, 50), 4, kvferry_timeline=True)
        await asyncio.to_thread(wait_for, has(1), 60, "prefilling")
        short = [Stream(cluster.url, prompt(24, 60 + i), 4, kvferry_timeline=True) for i in range(20)]
        await asyncio.to_thread(wait_for, has(21), 60, "all are there")
    for stream in (document, *short):
        assert len(await stream.end()) == 4
    assert max(map(prefilled, short)) < prefilled(document), "the document was first"


def prefilled(stream):
    """When the last of a prompt was computed."""
    _, ended, _ = stream.timeline["prefiller"]["chunks"][-1]
    return ended


async def test_a_lead_killed_takes_its_ranks_along_and_an_idle_rank_takes_its_lead(cluster):
    node = cluster["decoder1"]
    rank = rank_of(node)
    node.kill()
    await asyncio.to_thread(wait_for, lambda: gone(rank), 60, "the rank gone with its lead")
    await asyncio.to_thread(heal, cluster)
    rank = rank_of(node)
    os.kill(rank, signal.SIGKILL)
    await asyncio.to_thread(ended_by_its_rank, node, rank)
    await asyncio.to_thread(heal, cluster)
    await ask(cluster)


async def test_a_drain_is_the_leads_affair_though_all_ranks_are_signalled(cluster):
    """As a terminal, or `kvferry up`, signals a whole process group."""
    expected = [await stream.end() for stream in streams(cluster)]
    node = cluster["decoder1"]
    rank = rank_of(node)
    async with under_way(cluster) as running:
        os.kill(rank, signal.SIGTERM)
        os.kill(rank, signal.SIGINT)
        stopping = asyncio.create_task(asyncio.to_thread(node.stop))
        await asyncio.to_thread(wait_for, lambda: not node.ready(), 60, "it drains")
    assert await stopping == 0
    assert [await stream.end() for stream in running] == expected
    assert not node.events("a rank has failed")
    assert gone(rank)
    await asyncio.to_thread(heal, cluster)


def test_a_model_that_cannot_be_split_is_said_before_anything_starts(cluster, tmp_path):
    node = cluster["decoder0"]
    log = tmp_path / "log"
    process = Forge.shared().start("decoder", [*node.flags, "--tp", "3"], log, {})
    assert process.wait(60) == 2
    assert "Error: --tp 3: 2 KV heads cannot be split over 3 ranks" in log.read_text()
