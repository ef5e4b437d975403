"""JSON schemas by the hundred: whatever tokens are drawn at random under a schema's grammar validates against it.

The suite takes every seventh schema once; KVFERRY_ALL_SCHEMAS=1 takes them all, several times.
"""

import json
import os

import pytest
import torch
from closing_dice import Dice, draw
from json_formats import FORMATS
from jsonschema import Draft202012Validator
from kvferry_engine.grammar import GrammarCompiler, GrammarError
from kvferry_proto.grammar import Grammar
from schemas import UNSUPPORTED, collection
from tokenizers import Tokenizer

ALL = bool(os.environ.get("KVFERRY_ALL_SCHEMAS"))
SCHEMAS = collection()[:: 1 if ALL else 7]
SEEDS = range(4) if ALL else [0]
VOCABULARY = 49152
ENDS = frozenset({2})
PATIENCE = 16
MOST = 400


@pytest.fixture(scope="module")
def compiler(default_model):
    compiler = GrammarCompiler(default_model, VOCABULARY)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return Tokenizer.from_file(str(default_model / "tokenizer.json"))


@pytest.fixture(autouse=True)
def _one_thread():
    """Rows are few: more threads would wait for each other, and burn cores by it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compiled(compiler, schema):
    return compiler.compile_now(Grammar.json_schema(json.dumps(schema)), ENDS)


@pytest.fixture(scope="module")
def matchers(compiler):
    return [compiled(compiler, schema) for schema in SCHEMAS]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_drawn_validates(matchers, tokenizer, seed):
    dice = Dice(tokenizer, VOCABULARY, ENDS, seed=seed, patience=PATIENCE)
    drawing = [matcher.copy() for matcher in matchers]
    answers = draw(drawing, dice, VOCABULARY, ENDS, most=MOST)
    for schema, matcher, answer in zip(SCHEMAS, drawing, answers, strict=True):
        text = tokenizer.decode(answer)
        assert matcher.complete, (schema, text)
        Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


@pytest.mark.parametrize(("schema", "why"), UNSUPPORTED, ids=lambda value: json.dumps(value)[:40])
def test_what_is_not_supported_is_said(compiler, schema, why):
    with pytest.raises(GrammarError, match=r"^the json_schema can't be used: ") as refused:
        compiled(compiler, schema)
    assert why in str(refused.value)


@pytest.mark.parametrize("escaped", [False, True])
def test_a_large_divisor_is_refused_within_a_lark_grammar_too(compiler, escaped):
    name = "\\u006d\\u0075ltipleOf" if escaped else "multipleOf"
    with pytest.raises(GrammarError, match="multipleOf: 99999999 is too large"):
        compiler.compile_now(Grammar.lark(f'start: %json {{"type": "integer", "{name}" : 99999999}}'), ENDS)


@pytest.mark.parametrize("divisor", [0.01, 1e-5, 25, 0.25, 1000000])
def test_usual_divisors_are_held(compiler, divisor):
    assert compiled(compiler, {"type": "number", "multipleOf": divisor}).failure == ""
