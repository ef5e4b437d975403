"""The official openai client against a router: what its users do, and what its exceptions become."""

import asyncio

import openai
import pytest
from router_rig import running_cluster, warm_up
from scripted import ANSWER
from text_folder import MODEL, make_model_folder

pytestmark = pytest.mark.usefixtures("folder", "nothing_left")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
PROMPT = {"model": MODEL, "prompt": "one two", "max_tokens": 100}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    warm_up()
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def cluster(redis_server, folder):
    async with running_cluster(redis_server.url, folder, admission_seconds=0.3) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster):
    url = f"{cluster.router.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
        yield client


async def test_models(client):
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "kvferry"


async def test_answers(cluster, client):
    await cluster.decoder()
    chat = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1, stop=["nothing"], user="me")
    assert chat.choices[0].message.content == ANSWER
    assert chat.choices[0].finish_reason == "stop"
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    completion = await client.completions.create(**PROMPT, logprobs=1, extra_body={"return_token_ids": True})
    assert completion.choices[0].text == ANSWER
    assert len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens
    assert completion.choices[0].token_ids == cluster.tokens()


async def test_streams(cluster, client):
    await cluster.decoder()
    text, used = "", None
    async for chunk in await client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    ):
        used = chunk.usage or used
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == ANSWER
    assert used.completion_tokens == len(cluster.tokens())
    stream = await client.completions.create(**PROMPT, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER


async def test_closing_a_stream_cancels(cluster, client, eventually):
    decoder = await cluster.decoder()
    decoder.pause_at = 3
    stream = await client.completions.create(**PROMPT, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await eventually(lambda: decoder.cancelled)


async def test_errors_become_its_exceptions(cluster, client):
    with pytest.raises(openai.InternalServerError) as nobody:
        await client.completions.create(**PROMPT)
    assert (nobody.value.status_code, nobody.value.code) == (503, "no_nodes")
    await cluster.decoder("d1", free_pages=0)
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(**PROMPT)
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(**CHAT, n=2)
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(**(CHAT | {"model": "other"}))
    assert unknown.value.code == "model_not_found"
    assert unknown.value.body["phase"] == "route"


async def test_an_error_in_a_stream_is_raised(cluster, client):
    decoder = await cluster.decoder()
    decoder.pause_at = 3
    stream = await client.completions.create(**PROMPT, stream=True)
    async with asyncio.timeout(30):
        with pytest.raises(openai.APIError, match="d1 is gone"):  # noqa: PT012
            async for _ in stream:
                if decoder.inbox is not None and not decoder.go.is_set():
                    decoder.go.set()
                    decoder.pause_at = None
                    decoder.running[decoder.assigned[0].request_id].cancel()
                    await decoder.kill()


async def test_the_sync_client(cluster):
    await cluster.decoder()

    def use():
        with openai.OpenAI(base_url=f"{cluster.router.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
            chat = client.chat.completions.create(**CHAT).choices[0].message.content
            stream = client.completions.create(**PROMPT, stream=True)
            return chat, "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(use) == (ANSWER, ANSWER)
