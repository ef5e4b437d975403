"""Structured answers on a decoder, over its real sockets: from the first token to the last, and after a replay."""

import json

import pytest
from kvferry_engine.grammar import folder_tokenizer, make_tokenizer
from kvferry_proto.errors import ErrorCode
from kvferry_proto.grammar import Grammar
from kvferry_proto.message import RequestFailed
from kvferry_proto.to_router import Cancelled, Finished
from kvferry_proto.usage import FinishReason
from local import pair
from tokenizers import Tokenizer

PROMPT = list(range(100, 150))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 22, 333]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
JSON = Grammar.json_schema(SCHEMA)
LONG = 40


@pytest.fixture(scope="module", autouse=True)
def _tokenizer(tiny_model):
    """Read once, before nodes run in this process: it holds everything else up."""
    make_tokenizer((tiny_model / "tokenizer.json").read_text(encoding="utf-8"), 49152, frozenset({2}))


@pytest.fixture(scope="module")
def text(tiny_model):
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json")).decode


async def test_grammar_holds_from_the_first_token_to_the_last(redis_server, tiny_model, text, eventually):
    before = folder_tokenizer.cache_info()
    async with pair(redis_server.url, tiny_model) as (prefilling, decoding, router):
        # The decoder has its tokenizer before it joins, for the end tokens that requests name.
        joined = folder_tokenizer.cache_info()
        assert joined.hits + joined.misses == before.hits + before.misses + 1

        async def ask(tokens=PROMPT, **fields):
            asked = router.ask(decoding, tokens, prefiller=prefilling, **({"max_tokens": LONG} | fields))
            return asked, await router.outcome(asked)

        free, _ = await ask(max_tokens=9)
        whole, end = await ask(grammar=JSON)
        assert end.finish_reason is FinishReason.STOP
        value = json.loads(text(whole.tokens))
        assert (len(value["name"]) <= 8, value["size"] in (1, 22, 333)) == (True, True)
        assert set(value) == {"name", "size"}
        assert whole.tokens != free.tokens

        # The cruel case: the one token is the grammar's first, and is taken exactly once.
        first, end = await ask(grammar=JSON, max_tokens=1)
        assert first.tokens == whole.tokens[:1]
        assert end.finish_reason is FinishReason.LENGTH
        chosen, end = await ask(grammar=Grammar.choice(["y", "n"]), max_tokens=1)
        assert text(chosen.tokens) in ("y", "n")
        # Nothing can follow: the answer is whole, though max_tokens was reached with it.
        assert end.finish_reason is FinishReason.STOP

        # A decoder that takes over goes on where the other one stood, wherever that was.
        for place in (1, 5, len(whole.tokens) - 1):
            rest, end = await ask(PROMPT + whole.tokens[:place], answered=place, grammar=JSON, max_tokens=LONG - place)
            assert (rest.tokens, end.finish_reason) == (whole.tokens[place:], FinishReason.STOP)
        rest, end = await ask(PROMPT + whole.tokens, answered=len(whole.tokens), grammar=JSON)
        assert (rest.tokens, end.finish_reason) == ([], FinishReason.STOP)
        assert end.usage.completion_tokens == len(whole.tokens)
        _, end = await ask([*PROMPT, 7], answered=1, grammar=JSON)
        assert isinstance(end, RequestFailed)

        # The end token may come where the grammar is satisfied, and only there.
        spoken, end = await ask(grammar=Grammar.regex("a{3,}"), logit_bias=((2, 100.0),))
        assert text(spoken.tokens) == "aaa"
        assert (spoken.tokens[-1], end.finish_reason) == (2, FinishReason.STOP)
        sampled, _ = await ask(grammar=JSON, temperature=1.0, seed=5, top_p=0.9, min_p=0.01, frequency_penalty=0.5)
        json.loads(text(sampled.tokens))

        # Free and bound answers in one batch are each what they are alone.
        kinds = ((None, 9), (JSON, LONG), (None, 9), (JSON, LONG))
        crowd = [router.ask(decoding, PROMPT, max_tokens=most, grammar=grammar) for grammar, most in kinds]
        for asked, alone in zip(crowd, (free, whole, free, whole), strict=True):
            assert isinstance(await router.outcome(asked), Finished)
            assert asked.tokens == alone.tokens
        assert folder_tokenizer.cache_info().misses == joined.misses
        await eventually(lambda: not decoding.held() and not prefilling.held())


REFUSED = [
    (Grammar.json_schema({"not": {"type": "string"}}), "not"),
    (Grammar.json_schema({"type": "nothing"}), "nothing"),
    (Grammar.json_schema("{"), "EOF"),
    (Grammar.json_schema({"$ref": "https://example.org/schema"}), "example"),
    (Grammar.regex("(" * 3000 + "a" + ")" * 3000), "regex"),
    (Grammar.regex("(a"), "regex"),
    (Grammar.lark("start: foo("), "lark"),
    (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 4}), "nsatisfiable"),
]


async def test_a_grammar_that_can_t_be_used_is_refused(decoder):
    node, router = decoder
    for grammar, why in REFUSED:
        failed = await router.outcome(router.ask(node, PROMPT[:9], grammar=grammar))
        assert failed.error.code is ErrorCode.BAD_REQUEST, (grammar, failed.error)
        assert why in failed.error.message
        assert len(failed.error.message) < 500
        assert node.held() == {}


async def test_cancelled_while_its_grammar_compiles(decoder, eventually):
    node, router = decoder
    hard = {f"p{i}": {"type": "string", "pattern": f"^(.*a.{{{i % 30}}}b){{3}}$"} for i in range(900)}
    asked = router.ask(node, PROMPT[:9], grammar=Grammar.json_schema({"type": "object", "properties": hard}))
    router.cancel(asked)
    assert isinstance(await router.outcome(asked), Cancelled)
    await eventually(lambda: not node.held())
    after = router.ask(node, PROMPT[:9], grammar=Grammar.choice(["yes"]))
    assert isinstance(await router.outcome(after), Finished)
    assert not asked.tokens


@pytest.fixture
async def decoder(redis_server, tiny_model):
    async with pair(redis_server.url, tiny_model) as (_, decoding, router):
        yield decoding, router
