"""Tool calls in the router: found in text that comes in any pieces, put into prompts, and demanded by a grammar."""

import itertools
import json
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_engine.grammar import GrammarCompiler, make_tokenizer
from kvferry_router.answer import GrowingAnswer
from kvferry_router.bad_request import BadRequest
from kvferry_router.chat_template import ChatTemplate
from kvferry_router.chat_turns import template_tools, template_turns
from kvferry_router.job import TokenEvent
from kvferry_router.jobs import JobMaker
from kvferry_router.limits import Limits
from kvferry_router.model_folder import load_model_text
from kvferry_router.openai_parse import parse
from kvferry_router.openai_replies import ChatChoice
from kvferry_router.openai_types import ChatRequest
from kvferry_router.settings import RouterSettings
from kvferry_router.tokenizer import Tokenizer
from kvferry_router.tool_calls import ToolCallParser
from kvferry_router.tool_choice import tool_grammar
from llguidance import LLMatcher
from text_folder import make_model_folder
from tokenizers import Tokenizer as Encoder

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_cal>"}}\n</tool_call>'
TWO = '<tool_call>{"name":"g","arguments":{}}</tool_call>'
DEEP = '{"a":' * 300 + "{}" + "}" * 300
"""orjson reads it, and does not write it."""
DEEP_CALL = f'<tool_call>{{"name": "f", "arguments": {DEEP}}}</tool_call>'
BROKEN = '<tool_call>{"name": "f"}</tool_call>'
NOTHING = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
CALLS = [
    ("no call at all, 1 < 2", "no call at all, 1 < 2", []),
    (ONE, "", ["f"]),
    (f"Let me see.\n{ONE}\n{TWO}\n", "Let me see.", ["f", "g"]),
    (f"{ONE} and more", " and more", ["f"]),
    (f"x{BROKEN}{TWO}", f"x{BROKEN}", ["g"]),
    (f"{DEEP_CALL}{TWO}", DEEP_CALL, ["g"]),
    ("Wait. <tool_call>not closed", "Wait.", []),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x', "", []),
    (f'{ONE}\n<tool_call>\n{{"name": "f", "argu', "", ["f"]),
    (f"{ONE}\n<tool_c", "", ["f"]),
    (ONE.removesuffix("\n</tool_call>"), "", ["f"]),
    ("ends in a half <tool_", "ends in a half", []),
    ("3 is not <", "3 is not <", []),
    ("</tool_call> alone ", "</tool_call> alone ", []),
]
FUNCTION = {
    "name": "weather",
    "description": "Looks out of the window",
    "parameters": {
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "nothing"}}]
MESSAGES = [
    {"role": "user", "content": "How is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "nothing", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def split(parser, pieces):
    text, calls = "", []
    for piece in pieces:
        more, found = parser.push(piece)
        text, calls = text + more, calls + found
    more, found = parser.finish()
    return text + more, calls + found


@pytest.mark.parametrize(("text", "plain", "names"), CALLS, ids=range(len(CALLS)))
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 140), max_size=12))
def test_calls_are_found_wherever_the_text_is_cut(text, plain, names, cuts):
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    found, calls = split(ToolCallParser(), pieces)
    assert (found, [call.name for call in calls]) == (plain, names)
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize("ids", [False, True])
def test_a_streamed_call_comes_in_chunks_that_all_tell_something(ids):
    asked = parse(json.dumps({"messages": MESSAGES, "tools": TOOLS, "return_token_ids": ids}).encode(), ChatRequest)
    choice = ChatChoice(0, SimpleNamespace(prompt_tokens=[1]), asked, None)
    events = [TokenEvent(token_ids=[ord(each)], text=each, logprobs=[]) for each in f"Wait. {ONE}"]
    chunks = [chunk for event in events if (chunk := choice.chunk(event)) is not None]
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", [])] == ["f"]
    if ids:
        assert [token for chunk in chunks for token in chunk["token_ids"]] == [ord(each) for each in f"Wait. {ONE}"]
    else:
        assert all(deltas)


def request(**fields):
    return parse(json.dumps({"messages": MESSAGES, "tools": TOOLS} | fields).encode(), ChatRequest)


def test_a_template_that_knows_tools_gets_objects():
    template = ChatTemplate("{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}\n{% endfor %}", {})
    assert template.takes_tools
    asked = request()
    text = template.render(template_turns(asked.messages, asked.tools, native=True), template_tools(asked.tools))
    assert '"name": "weather"' in text
    assert '"tool_calls": [{"type": "function", "function": {"name": "nothing", "arguments": {"a": 1}}}]' in text
    assert '"role": "tool", "content": "sunny", "tool_call_id": "c1"' in text


@pytest.mark.parametrize("depth", [250, 300, 1000])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("native", [False, True])
async def test_what_is_nested_too_deeply_is_refused_by_its_name(tmp_path, depth, choice, native):
    folder = make_model_folder(tmp_path)
    text = load_model_text(folder)
    if native:
        source = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m | tojson }}{% endfor %}"
        text = msgspec.structs.replace(text, template=ChatTemplate(source, {}))
    maker = JobMaker(RouterSettings(model=str(folder)), text, Limits(list, 65536))
    deep = '{"a":' * depth + "{}" + "}" * depth
    function, calls = {"name": "f", "parameters": 0}, [{"function": {"name": "f", "arguments": deep}}]
    tools = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}], "tool_choice": choice}
    for field, body in (
        ("tools", json.dumps(tools).replace('"parameters": 0', f'"parameters": {deep}')),
        ("messages[0].tool_calls", json.dumps({"messages": [{"role": "assistant", "tool_calls": calls}]})),
    ):
        asked = parse(body.encode(), ChatRequest)
        if depth < 254:
            await maker.chat(asked, 0)
            continue
        with pytest.raises(BadRequest, match="nested too deeply") as refused:
            await maker.chat(asked, 0)
        assert refused.value.error.param == field


def test_any_other_template_gets_them_as_text():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {})
    assert not template.takes_tools
    asked = request()
    text = template.render(template_turns(asked.messages, asked.tools, native=False))
    assert text.startswith("[system]# Tools")
    assert '"description":"Looks out of the window"' in text
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in text
    assert '[assistant]<tool_call>\n{"name":"nothing","arguments":{"a":1}}\n</tool_call>' in text
    assert text.endswith("[user]<tool_response>\nsunny\n</tool_response>")
    own = template_turns(
        request(messages=[{"role": "system", "content": "Be kind."}]).messages, asked.tools, native=False
    )
    assert [turn["role"] for turn in own] == ["system"]
    assert own[0]["content"].startswith("Be kind.\n\n# Tools")


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [
                '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "unit": "C"}}\n</tool_call>',
                '<tool_call>\n{"name": "nothing", "arguments": {"x": [1]}}\n</tool_call>',
                "\n".join([NOTHING] * 8),
            ],
            [
                "Sure",
                '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "unit": "K"',
                '<tool_call>\n{"name": "x',
                "\n".join([NOTHING] * 9),
            ],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": True},
            [NOTHING, f"{NOTHING}\n{NOTHING}", "\n".join([NOTHING] * 8)],
            ["Sure", "\n".join([NOTHING] * 9)],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nothing"}}},
            [NOTHING],
            ['<tool_call>\n{"name": "weather', f"{NOTHING}\n<tool"],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [NOTHING],
            [f"{NOTHING}\n<tool"],
        ),
    ],
    ids=["required", "several", "named", "one"],
)
def test_a_call_that_must_come_is_held_to_its_schema(default_model, choice, good, bad):
    compiler = GrammarCompiler(default_model, 49152)
    tokenizer = make_tokenizer((default_model / "tokenizer.json").read_text(encoding="utf-8"), 49152, frozenset({2}))
    grammar = tool_grammar(request(**choice))
    for text in good:
        matcher = compiler.compile_now(grammar, frozenset({2}))
        tokens = [*tokenizer.tokenize_str(text), 2]
        assert matcher.fits(tokens) == len(tokens)
        _, calls = split(ToolCallParser(), [text])
        assert len(calls) == text.count("<tool_call>")
    for text in bad:
        tokens = tokenizer.tokenize_str(text)
        assert compiler.compile_now(grammar, frozenset({2})).fits(tokens) < len(tokens)
    compiler.close()


@pytest.mark.parametrize("tools", [True, False])
async def test_tags_that_are_special_tokens_are_text_where_there_are_tools(tmp_path, tools):
    folder = make_model_folder(tmp_path)
    encoder = Encoder.from_file(str(folder / "tokenizer.json"))
    encoder.add_special_tokens(["<tool_call>", "</tool_call>"])
    encoder.save(str(folder / "tokenizer.json"))
    text = load_model_text(folder)
    maker = JobMaker(RouterSettings(model=str(folder)), text, Limits(list, 4096))
    job = await maker.chat(request(messages=MESSAGES[:1], tools=TOOLS if tools else None), 0)
    answer = GrowingAnswer(job, text.tokenizer, text.stop_token_ids)
    ids = text.tokenizer.encode_now(f"ü{ONE}").tolist()
    assert encoder.token_to_id("<tool_call>") in ids
    for token in ids:
        answer.add([token], [])
    answer.end()
    spoken = answer.take().text
    assert spoken == (f"ü{ONE}" if tools else f"ü{ONE}".replace("<tool_call>", "").replace("</tool_call>", ""))


def test_tags_that_are_special_tokens_are_asked_for_as_such(default_model):
    encoder = Encoder.from_file(str(default_model / "tokenizer.json"))
    encoder.add_special_tokens(["<tool_call>", "</tool_call>"])
    tags = Tokenizer(encoder, encoder.get_vocab_size()).special(("<tool_call>", "</tool_call>", "other"))
    assert sorted(tags) == ["</tool_call>", "<tool_call>"]
    grammar = tool_grammar(request(tool_choice="required"), tags)
    tokenizer = make_tokenizer(encoder.to_str(), encoder.get_vocab_size(), frozenset({2}))
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.text))
    ids = [*encoder.encode(NOTHING).ids, 2]
    assert set(tags.values()) <= set(ids)
    assert matcher.validate_tokens(ids) == len(ids)


def test_a_call_that_may_come_is_free():
    assert tool_grammar(request()) is None
    assert tool_grammar(request(tool_choice="auto")) is None
    assert tool_grammar(request(tool_choice="none")) is None
