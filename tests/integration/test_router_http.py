"""The OpenAI API against scripted decoders: real sockets, real Redis, no model."""

import asyncio
import json

import pytest
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.grammar import Grammar
from kvferry_proto.message import RequestFailed
from kvferry_proto.page_table import Source, unpack
from kvferry_proto.timeline import DecodeTimeline
from kvferry_proto.to_router import Accepted
from kvferry_proto.usage import FinishReason
from router_rig import running_cluster, warm_up
from scripted import ANSWER, finished, step
from text_folder import MODEL, make_model_folder

pytestmark = pytest.mark.usefixtures("folder", "nothing_left")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    warm_up()
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def cluster(redis_server, folder):
    async with running_cluster(redis_server.url, folder) as cluster:
        yield cluster


def parsed(events):
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


# --- answers --------------------------------------------------------------------------------------------------------


async def test_completion(cluster):
    await cluster.decoder()
    body = await cluster.complete(prompt="one two three", return_token_ids=True)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (ANSWER, "stop", None)
    assert choice["token_ids"] == cluster.tokens()
    assert choice["prompt_token_ids"] == cluster.encode("one two three")
    used = body["usage"]
    assert used["completion_tokens"] == len(cluster.tokens())
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert body["object"] == "text_completion"
    assert "kvferry" not in body


async def test_assign_says_what_was_asked(cluster):
    decoder = await cluster.decoder()
    await cluster.complete(
        prompt=list(range(10, 23)), temperature=0, top_p=0.5, top_k=7, seed=-1, max_tokens=3, ignore_eos=True
    )
    await cluster.complete(
        prompt="x", min_p=0.25, presence_penalty=-1, frequency_penalty=2, repetition_penalty=1.5, logit_bias={"7": -100}
    )
    assign = decoder.assigned[0]
    sampling = assign.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0, 0.5, 7, 3)
    assert (sampling.seed, sampling.ignore_eos, sampling.logprobs) == ((1 << 63) - 1, True, -1)
    assert (sampling.presence_penalty, sampling.repetition_penalty, sampling.logit_bias) == (0, 1, ())
    penalised = decoder.assigned[1].sampling
    assert (penalised.min_p, penalised.presence_penalty, penalised.frequency_penalty) == (0.25, -1, 2)
    assert (penalised.repetition_penalty, penalised.logit_bias) == (1.5, ((7, -100),))
    assert assign.tokens.tolist() == list(range(10, 23))
    assert assign.stop_token_ids == cluster.text.stop_token_ids
    assert (assign.answered, assign.prefiller) == (0, None)
    # 13 tokens, of which 12 are cached: 3 pages of 4, all full, all computed by the decoder.
    entries = unpack(assign.page_table)
    assert [entry.source for entry in entries] == [Source.LOCAL] * 3
    assert all(entry.block_hash for entry in entries)
    assert cluster.router.ref.id in assign.request_id


@pytest.mark.parametrize(
    ("length", "pages", "named"), [(1, 0, 0), (2, 1, 0), (4, 1, 0), (5, 1, 1), (6, 2, 1), (9, 2, 2)]
)
async def test_page_table_at_the_borders_of_pages(cluster, length, pages, named):
    decoder = await cluster.decoder()
    await cluster.complete(prompt=[50] * length, max_tokens=1)
    entries = unpack(decoder.assigned[0].page_table)
    assert len(entries) == pages
    assert sum(entry.block_hash != 0 for entry in entries) == named


async def test_seeds_are_drawn_where_none_is_given(cluster):
    decoder = await cluster.decoder()
    for _ in range(3):
        await cluster.complete(max_tokens=1)
    assert len({assign.sampling.seed for assign in decoder.assigned}) == 3


async def test_streamed_completion(cluster):
    await cluster.decoder()
    events = await cluster.events(prompt="one", return_token_ids=True, stream_options={"include_usage": True})
    chunks = parsed(events)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == ANSWER
    assert [i for chunk in chunks[:-1] for i in chunk["choices"][0]["token_ids"]] == cluster.tokens()
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(cluster.tokens())
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert sum("prompt_token_ids" in chunk["choices"][0] for chunk in chunks[:-1]) == 1


async def test_chat(cluster):
    decoder = await cluster.decoder()
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    body = await cluster.complete(path="/v1/chat/completions", messages=messages)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    assert decoder.assigned[0].tokens.tolist() == cluster.encode(prompt)


async def test_streamed_chat(cluster):
    await cluster.decoder()
    messages = [{"role": "user", "content": "Hi"}]
    chunks = parsed(await cluster.events(path="/v1/chat/completions", messages=messages))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_default_lengths(cluster):
    decoder = await cluster.decoder()
    await cluster.complete(max_tokens=None)
    await cluster.complete(path="/v1/chat/completions", max_tokens=None)
    await cluster.complete(path="/v1/chat/completions", max_tokens=None, max_completion_tokens=5)
    first, second, third = (assign.sampling.max_tokens for assign in decoder.assigned)
    # A chat gets the room that is left of the 256 tokens, which is less than the default for chats.
    assert (first, second, third) == (16, 256 - len(decoder.assigned[1].tokens), 5)


@pytest.mark.parametrize(
    "prompts", [["one", "two two", "three"], [[50, 51], [52]], ["one"]], ids=["texts", "ids", "single"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(cluster, prompts, stream):
    decoder = await cluster.decoder()
    if stream:
        chunks = parsed(await cluster.events(prompt=prompts))
        texts = {}
        for chunk in chunks:
            choice = chunk["choices"][0]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == len(prompts)
    else:
        body = await cluster.complete(prompt=prompts)
        texts = {choice["index"]: choice["text"] for choice in body["choices"]}
        assert body["usage"]["completion_tokens"] == len(prompts) * len(cluster.tokens())
    assert texts == dict.fromkeys(range(len(prompts)), ANSWER)
    assert len(decoder.assigned) == len(prompts)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_across_tokens(cluster, stream):
    decoder = await cluster.decoder()
    decoder.pause_at = len(cluster.tokens()) - 1
    stop = ["never", "rld, the"]
    if stream:
        chunks = parsed(await cluster.events(prompt="one", stop=stop))
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await cluster.complete(stop=stop))["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == ("Hello wö", "stop")
    await asyncio.wait_for(cluster.idle(), 60)
    # The decoder was told, or it would go on to the end.
    assert decoder.cancelled == [decoder.assigned[0].request_id]


async def in_runs(decoder, origin, assign):
    """Answer as a decoder that guesses: several tokens a step."""
    origin.reply(Accepted(request_id=assign.request_id))
    for start in range(0, len(decoder.answer), 3):
        origin.reply(step(assign, decoder.answer[start : start + 3]))
    timeline = DecodeTimeline(drafted=9, accepted=5)
    origin.reply(finished(assign, len(decoder.answer), FinishReason.STOP, timeline))


async def test_several_tokens_a_step_and_what_was_guessed(cluster):
    await cluster.decoder(script=in_runs)
    body = await cluster.complete(prompt="one", logprobs=1, return_token_ids=True)
    choice = body["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (ANSWER, cluster.tokens())
    assert len(choice["logprobs"]["tokens"]) == len(cluster.tokens())
    guessed = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 4}
    assert body["usage"]["completion_tokens_details"] == guessed
    # A stop string that ends in the midst of a run: the rest of the run is not part of the answer.
    cut = await cluster.complete(prompt="one", stop="He", return_token_ids=True)
    choice = cut["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["token_ids"] == cluster.tokens()[:1]
    assert cut["usage"]["completion_tokens"] == 1


async def test_logprobs_of_completions(cluster):
    await cluster.decoder()
    entry = (await cluster.complete(logprobs=2, max_tokens=3))["choices"][0]["logprobs"]
    assert entry["token_logprobs"] == [-0.5] * 3
    assert [len(top) for top in entry["top_logprobs"]] == [3] * 3
    assert entry["text_offset"][0] == 0
    assert entry["text_offset"][2] == len(entry["tokens"][0] + entry["tokens"][1])
    plain = (await cluster.complete(logprobs=0, max_tokens=3))["choices"][0]["logprobs"]
    assert plain["top_logprobs"] == [None] * 3


async def test_logprobs_of_chats(cluster):
    await cluster.decoder()
    path = "/v1/chat/completions"
    content = (await cluster.complete(path=path, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == ANSWER
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    messages = [{"role": "user", "content": "Hi"}]
    chunks = parsed(await cluster.events(path=path, messages=messages, logprobs=True))
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]


async def test_timeline_on_demand(cluster):
    await cluster.decoder()
    record = (await cluster.complete(kvferry_timeline=True))["kvferry"]
    router = record["timeline"]["router"]
    marks = [router[name] for name in ("received", "placed", "accepted", "first_token", "finished")]
    assert marks == sorted(marks)
    assert marks[0] > 0
    assert record["phases_ms"]["first_token_ms"] > 0
    assert record["timeline"]["decoder"]["joined"] > 0
    headers = {"x-kvferry-timeline": "1"}
    answer = await cluster.http.post("/v1/completions", json={"prompt": "one", "stream": True}, headers=headers)
    chunks = parsed([line[6:] for line in answer.text.splitlines() if line])
    assert "kvferry" in chunks[-1]
    assert await cluster.metric("kvferry_ttft_seconds_count") == 2
    assert await cluster.metric("kvferry_queue_seconds_count") == 2
    assert await cluster.metric("kvferry_inter_token_seconds_count") > 5


async def test_models_and_operations(cluster):
    assert (await cluster.http.get("/health")).status_code == 200
    assert (await cluster.http.get("/ready")).status_code == 503
    assert "no decoder" in (await cluster.http.get("/ready")).text
    await cluster.decoder()
    assert (await cluster.http.get("/ready")).status_code == 200
    models = (await cluster.http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    assert (await cluster.http.get(f"/v1/models/{MODEL}")).json()["object"] == "model"
    await cluster.complete()
    state = await cluster.state()
    assert not any(state["held"].values())
    assert state["decoder_channels"] == 1
    assert await cluster.metric('kvferry_requests_total{endpoint="completions",status="200"}') == 1


# --- refusals -------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BROKEN_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{"}}
BAD = [
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.5}, "min_p"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": {"pattern": "x" * 70_000}}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [5]}, "guided_choice[0]"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": "x"}}, "structured_outputs.json"),
    ({"tools": [{}]}, "tools"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": "x"}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": "x" * 257}, "stop"),
    ({"stream_options": 3}, "stream_options"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["one", [5]]}, "prompt"),
    ({"prompt": [5, -1]}, "prompt"),
    ({"prompt": [5, 100000]}, "prompt"),
    ({"prompt": ["x"] * 65}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [5] * 256}, "prompt"),
    ({"max_tokens": 255}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[json.dumps(fields)[:40] for fields, _ in BAD])
async def test_bad_fields_are_named(cluster, fields, param):
    decoder = await cluster.decoder()
    error = (await cluster.complete(400, **fields))["error"]
    assert (error["param"], error["type"], error["phase"]) == (param, "invalid_request_error", "route")
    assert param.split("[")[0] in error["message"]
    assert decoder.assigned == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]}, "messages[0].tool_calls"),
        ({"tools": [{}]}, "type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_bad_chat_fields_are_named(cluster, fields, param):
    await cluster.decoder()
    error = (await cluster.complete(400, path="/v1/chat/completions", **fields))["error"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"response_format": {"type": "xml"}}, "text, json_object, json_schema"),
        ({"tools": [TOOL, TOOL | {"type": "xml"}]}, "function"),
        ({"tools": [TOOL], "tool_choice": "xml"}, "none, auto, required"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "xml"}]}]}, "function"),
    ],
    ids=["response_format", "tools", "tool_choice", "tool_calls"],
)
async def test_values_that_are_allowed_are_listed(cluster, fields, allowed):
    error = (await cluster.complete(400, path="/v1/chat/completions", **fields))["error"]
    expected = ", ".join(sorted(allowed.split(", ")))
    assert error["message"] == f"{error['param']}: expected one of {expected}, got 'xml'"


async def test_neutral_values_and_unknown_fields_pass(cluster):
    await cluster.decoder()
    neutral = {"n": 1, "best_of": 1, "logit_bias": {}, "presence_penalty": 0.0, "response_format": {"type": "text"}}
    await cluster.complete(**neutral, user="me", metadata={"a": "b"}, suffix=None, tool_choice="auto", invented=[1])


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            Grammar.json_schema({"type": "null"}),
        ),
        ({"guided_json": '{"type": "null"}'}, Grammar.json_schema({"type": "null"})),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["a.b", "c"]}, Grammar.regex(r"(a\.b)|(c)")),
        ({"guided_grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.regex("(a)")),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar.regex("a")),
        ({"response_format": {"type": "text"}}, None),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
async def test_grammars_reach_the_decoder(cluster, fields, grammar):
    decoder = await cluster.decoder()
    await cluster.complete(**fields)
    assert decoder.assigned[0].grammar == grammar


async def test_a_grammar_that_the_decoder_refuses_is_the_client_s_mistake(cluster):
    async def refuse(decoder, origin, assign):
        error = RequestError(code=ErrorCode.BAD_REQUEST, message="no such keyword", phase=Phase.ASSIGN, node="d1")
        origin.reply(RequestFailed(request_id=assign.request_id, error=error))

    decoder = await cluster.decoder("d1", refuse)
    for stream in (False, True):
        error = (await cluster.complete(400, guided_json={"not": {}}, stream=stream))["error"]
        assert (error["message"], error["type"]) == ("no such keyword", "invalid_request_error")
    assert len(decoder.assigned) == 2


async def test_lengths_at_the_limit(cluster):
    await cluster.decoder()
    too_long = (await cluster.complete(400, prompt=[50] * 256))["error"]
    assert too_long["code"] == "prompt_too_long"
    assert "256" in too_long["message"]
    over = (await cluster.complete(400, prompt=[50] * 200, max_tokens=57))["error"]
    assert all(number in over["message"] for number in ("200", "57", "257", "256"))
    await cluster.complete(prompt=[50] * 200, max_tokens=56)
    body = await cluster.complete(prompt=[50] * 255, max_tokens=None)
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_chat_s_prompt_is_its_messages(cluster):
    await cluster.decoder()
    messages = [{"role": "user", "content": "x" * 300}]
    error = (await cluster.complete(400, path="/v1/chat/completions", messages=messages))["error"]
    assert (error["code"], error["param"]) == ("prompt_too_long", "messages")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_chat_s_answer_is_too_long_by_the_name_that_its_client_uses(cluster, field):
    await cluster.decoder()
    lengths = {"max_tokens": None} | {field: 256}
    error = (await cluster.complete(400, path="/v1/chat/completions", **lengths))["error"]
    assert error["param"] == field
    assert f"{field} is 256" in error["message"]


async def test_what_is_no_request_at_all(cluster):
    async def refused(status, code, method="POST", path="/v1/completions", **options):
        answer = await cluster.http.request(method, path, **options)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        return answer

    await refused(400, "bad_request", content=b"{")
    await refused(400, "bad_request", content=b"[" * 100_000)
    await refused(400, "bad_request", content=b"[]")
    answer = await refused(400, "bad_request", content=b'{"prompt": "\xff"}')
    assert "not UTF-8: byte 0xff at offset 12" in answer.json()["error"]["message"]
    await refused(400, "bad_request", content=b'{"prompt": "x", "seed": 99999999999999999999999}')
    await refused(400, "bad_request", json={})
    answer = await refused(404, "not_found", path="/chat/completions")
    assert "POST /chat/completions: no such path; there are /v1/models," in answer.json()["error"]["message"]
    answer = await refused(405, "method_not_allowed", method="GET")
    assert answer.json()["error"]["message"] == "GET /v1/completions: this path takes POST"
    await refused(404, "model_not_found", json={"model": "gpt-9", "prompt": "x"})
    await refused(404, "model_not_found", method="GET", path="/v1/models/gpt-9")
    await refused(413, "request_too_large", content=b" " * (9 << 20))

    async def parts():
        for _ in range(9):
            yield b" " * (1 << 20)

    await refused(413, "request_too_large", content=parts())


async def test_nobody_there(cluster):
    answer = await cluster.http.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_nodes")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_decoder_that_fails_for_good_is_named(cluster):
    async def broken(_decoder, origin, assign):
        error = RequestError(code=ErrorCode.VERIFY_FAILED, message="page 3 differs", phase=Phase.TRANSFER)
        origin.reply(RequestFailed(request_id=assign.request_id, error=error))

    first = await cluster.decoder("d1", broken)
    await cluster.decoder("d2", broken)
    error = (await cluster.complete(502))["error"]
    assert (error["code"], error["phase"], error["message"]) == ("verify_failed", "transfer", "page 3 differs")
    assert error["node"] in ("d1", "d2")
    # Not retried: a checksum that is wrong is a finding, not bad luck.
    assert sum(len(decoder.assigned) for decoder in cluster.decoders) == 1
    assert first.record.ref.id == "d1"
