"""Everybody's way in, against a real cluster: OpenAI's client, ours over ZeroMQ, the command line."""

import subprocess
import sys

import httpx
import openai
import pytest
from cluster import Cluster
from kvferry import AsyncClient, Client, errors

STORY = "The ferry carries twelve crates of oranges across the river. " * 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, tiny_model):
    worker = ["--dtype", "float32", "--kv-memory", "8MiB"]
    with Cluster(tmp_path_factory.mktemp("clients"), tiny_model, decoders=2, worker=worker) as running:
        yield running
        running.wait_idle()


@pytest.fixture
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model.name


def test_chat_with_the_official_client(client, model):
    messages = [{"role": "user", "content": STORY}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=9, temperature=0)
    assert whole.usage.completion_tokens == 9
    assert whole.choices[0].finish_reason == "length"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(
        client.chat.completions.create(model=model, messages=messages, max_tokens=9, temperature=0, **options)
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_completions_with_logprobs_of_the_first_token(client, model):
    reply = client.completions.create(model=model, prompt=[STORY, "x"], max_tokens=3, temperature=0, logprobs=2)
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice in reply.choices:
        assert len(choice.logprobs.token_logprobs) == 3
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
        assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)


def test_errors_are_the_official_clients_exceptions(client, model):
    with pytest.raises(openai.NotFoundError, match="nothing-like-it"):
        client.completions.create(model="nothing-like-it", prompt="x")
    with pytest.raises(openai.BadRequestError, match="n"):
        client.completions.create(model=model, prompt="x", n=2)
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model=model, prompt=[7] * 5000)


def test_the_models_limit(cluster):
    """A prompt one token below the limit is answered with the one token that fits; at the limit and over it, 400."""
    limit = min(node.max_context for node in records(cluster))
    assert len(cluster.tokens([7] * (limit - 1), max_tokens=1, ignore_eos=True)) == 1
    for tokens in (limit, limit + 1):
        error = cluster.complete([7] * tokens, max_tokens=1, expect=400)["error"]
        assert str(limit) in error["message"]
        assert str(tokens) in error["message"]


def records(cluster):
    import msgspec
    import redis
    from kvferry_proto.nodes import NodeRecord, Role

    with redis.Redis.from_url(cluster.redis_url) as client:
        found = [client.hget(key, "record") for key in client.keys("kvferry:node:*")]
    every = [msgspec.json.decode(text, type=NodeRecord) for text in found]
    return [record for record in every if record.role is Role.DECODER]


def test_our_client_over_zeromq(cluster, client, model):
    same = client.completions.create(model=model, prompt=STORY, max_tokens=8, temperature=0).choices[0].text
    with Client(f"tcp://127.0.0.1:{cluster.zmq_port}") as ours:
        whole = ours.generate(STORY, max_tokens=8, temperature=0.0)
        assert whole.text == same
        assert whole.usage.completion_tokens == 8
        assert ours.generate(f"A new one. {STORY}", max_tokens=1).timeline.prefiller.pages > 0
        with ours.stream(STORY, max_tokens=8, temperature=0.0) as stream:
            assert "".join(piece.text for piece in stream) == same
        for piece in ours.stream(STORY, max_tokens=500, ignore_eos=True):
            assert piece is not None
            break
        with pytest.raises(errors.BadRequest, match="max_tokens"):
            ours.generate(STORY, max_tokens=0)
        with pytest.raises(errors.PromptTooLong):
            ours.generate(prompt_ids=[7] * 5000)
    cluster.wait_idle()


async def test_our_asyncio_client_cancels(cluster):
    async with AsyncClient(f"tcp://127.0.0.1:{cluster.zmq_port}") as ours:
        stream = await ours.stream(STORY, max_tokens=2000, ignore_eos=True)
        async for _ in stream:
            break
        stream.close()
        assert (await ours.generate("x", max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2
    cluster.wait_idle()


def test_the_time_line_tells_every_phase(cluster):
    phases = cluster.complete(STORY, max_tokens=4, ignore_eos=True, cache_salt="phases")["kvferry"]["phases_ms"]
    order = ["queued_ms", "prefill_started_ms", "last_page_ms", "joined_ms", "first_token_ms", "finished_ms"]
    assert [phases[name] for name in order] == sorted(phases[name] for name in order)
    assert phases["exposed_transfer_ms"] >= 0
    for metric in ("queue", "prefill", "exposed_transfer", "ttft", "inter_token"):
        assert f"kvferry_{metric}_seconds_count" in cluster["router"].metrics()
    assert 'kvferry_pages{state="free"}' in cluster["decoder0"].metrics()


def test_the_chat_command(cluster):
    command = [sys.executable, "-m", "kvferry.cli", "chat", "--once", "Hello", "--max-tokens", "5"]
    command += ["--endpoint", f"tcp://127.0.0.1:{cluster.zmq_port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_ready_and_health(cluster):
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
