"""Structured answers and tool calls through HTTP, with the openai client: a router, a prefiller and two decoders."""

import contextlib
import json

import openai
import pytest
from kvferry_engine.grammar import make_tokenizer
from local import start_decoder, start_prefiller
from router_rig import running_router

LEASE = {"lease_seconds": 4.0, "heartbeat_seconds": 0.3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 22, 333]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
UNIQUE = {"type": "array", "uniqueItems": True}


def tool_of(parameters):
    return {"type": "function", "function": {"name": "measure", "description": "Measures.", "parameters": parameters}}


TOOL = tool_of(SCHEMA)
LONG = "A long prompt is ferried from the prefiller to a decoder. " * 4


async def end(node):
    if not node.task.done():
        await node.end()


@pytest.fixture
async def cluster(redis_server, tiny_model):
    # Read once, before nodes run in this process: it holds everything else up.
    make_tokenizer((tiny_model / "tokenizer.json").read_text(encoding="utf-8"), 49152, frozenset({2}))
    nodes = [start_prefiller(redis_server.url, tiny_model)]
    nodes += [start_decoder(redis_server.url, tiny_model, name) for name in ("d1", "d2")]
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            stack.push_async_callback(end, node)
            await node.ready()
        router = await stack.enter_async_context(running_router(redis_server.url, tiny_model, **LEASE))
        url = f"{router.url}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=90)
        yield await stack.enter_async_context(client), nodes[1:], tiny_model.name


async def test_structured_answers(cluster):
    client, decoders, model = cluster
    base = {"model": model, "messages": [{"role": "user", "content": LONG}], "temperature": 0}

    async def ask(**fields):
        return (await client.chat.completions.create(**(base | {"max_tokens": 40} | fields))).choices[0]

    whole = await ask(response_format=FORMAT)
    value = json.loads(whole.message.content)
    assert (set(value), whole.finish_reason) == ({"name", "size"}, "stop")
    first = await ask(response_format=FORMAT, max_tokens=1)
    assert (whole.message.content.startswith(first.message.content), first.finish_reason) == (True, "length")
    assert first.message.content.startswith("{")
    answer = await client.chat.completions.create(
        **base, max_tokens=40, response_format=FORMAT, stop=['"size'], extra_body={"kvferry_timeline": True}
    )
    stopped, timeline = answer.choices[0], answer.kvferry["timeline"]
    assert timeline["decoder"]["first_token"]
    assert timeline["decoder"]["finished"]
    assert (stopped.message.content, stopped.finish_reason) == (whole.message.content.split('"size')[0], "stop")
    chosen = await ask(extra_body={"guided_choice": ["left", "right"]})
    assert (chosen.message.content in ("left", "right"), chosen.finish_reason) == (True, "stop")
    for fields, param in (
        ({"extra_body": {"guided_json": UNIQUE}}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}}},
            "response_format",
        ),
        ({"tools": [tool_of({"properties": {"a": UNIQUE}})], "tool_choice": "required"}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
            await ask(**fields)
        assert refused.value.param == param

    # The decoder that answers dies half-way; the other one goes on in the same grammar.
    with decoders[0].hold(0.2), decoders[1].hold(0.2):
        stream = aiter(await client.chat.completions.create(**base, max_tokens=40, response_format=FORMAT, stream=True))
        text = ""
        while not text:
            text += (await anext(stream)).choices[0].delta.content or ""
        killed = next(node for node in decoders if node.held())
        await killed.die()
    text += "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.message.content


async def test_tool_calls(cluster):
    client, _, model = cluster
    turns = [{"role": "user", "content": LONG}]
    base = {"model": model, "temperature": 0, "max_tokens": 90, "tools": [TOOL]}
    named = {"tool_choice": {"type": "function", "function": {"name": "measure"}}}
    choice = (await client.chat.completions.create(**base, **named, messages=turns)).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "measure")
    assert set(json.loads(call.function.arguments)) == {"name", "size"}

    stream = await client.chat.completions.create(**base, **named, messages=turns, stream=True)
    parts = [chunk.choices[0] async for chunk in stream]
    calls = [each for part in parts for each in part.delta.tool_calls or []]
    assert [(each.index, each.function.arguments) for each in calls] == [(0, call.function.arguments)]
    assert not any(part.delta.content for part in parts)
    assert parts[-1].finish_reason == "tool_calls"
    assert all(part.delta.role or part.delta.tool_calls or part.finish_reason for part in parts)

    required = base | {"tool_choice": "required", "parallel_tool_calls": False, "messages": turns}
    choice = (await client.chat.completions.create(**required)).choices[0]
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)
    for cut in (1, 8, 20):
        choice = (await client.chat.completions.create(**(required | {"max_tokens": cut}))).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)

    # The result goes back; nothing has to be called any more.
    turns += [
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "12 cm"},
    ]
    after = (await client.chat.completions.create(**(base | {"max_tokens": 3}), messages=turns)).choices[0]
    assert (after.finish_reason, after.message.tool_calls) == ("length", None)
