"""Speculation changes how fast an answer comes, and nothing about it: over a real model, whatever is guessed."""

import contextlib
import random

import pytest
from decode_rig import Rig, Scripted, one_thread
from engine_runner import tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_levels import level, needs_kernels
from kvferry_decoder.request import State
from kvferry_decoder.speculation import MOST_ROWS, Speculation
from kvferry_engine import grammar
from kvferry_engine.grammar import GrammarCompiler
from kvferry_engine.weights import load_model
from kvferry_proto.grammar import Grammar
from kvferry_proto.usage import FinishReason
from llguidance import LLParserLimits
from random_models import build_random
from tokenizers import Tokenizer

fixtures = (level,)
one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)

ANSWER = 14
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5, "top_p": 0.95},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "both": {"temperature": 1.1, "seed": 6, "frequency_penalty": 1.5, "logit_bias": ((3, 4.0), (9, -5.0)), "top_k": 30},
    "logprobs": {"logprobs": 3},
}
PROMPTS = {kind: tokens_of(length, seed=length) for kind, length in zip(KINDS, (1, 5, 8, 13, 21), strict=True)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_random(folder, "llama")
    return load_model(folder, "float32")


@contextlib.contextmanager
def rig_of(model, **options):
    rig = Rig(model, **options)
    try:
        yield rig
        rig.allocator.check()
        assert rig.allocator.held_pages == 0 or rig.scheduler.requests
    finally:
        rig.close()


@pytest.fixture(scope="module")
def plain(model):
    """The answers without speculation, by kind."""
    with rig_of(model) as rig:
        requests = {kind: rig.ask(PROMPTS[kind], max_tokens=ANSWER, **KINDS[kind]) for kind in KINDS}
        rig.decode()
        answers = {kind: rig.answers[request.id] for kind, request in requests.items()}
    assert all(len(answer) == ANSWER for answer in answers.values())
    assert answers["greedy"] != answers["penalised"]
    return answers


def spoilt(answers, seed, rate):
    """Guesses from the answers themselves, each replaced by some other token now and then."""
    chance = random.Random(seed)

    def script(request, most):
        rest = answers[request.id][request.generated :]
        return [token if chance.random() < rate else chance.randrange(199) for token in (rest + [0] * most)[:most]]

    return script


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1000), most=st.integers(1, 6), case=st.tuples(st.sampled_from([0, 0.6, 1]), st.booleans()))
def test_whatever_is_guessed_answers_stay_the_same(model, plain, seed, most, case):
    rate, scarce = case
    by_id = {str(number): plain[kind] for number, kind in enumerate(KINDS)}
    guess = Scripted(most, 256, spoilt(by_id, seed, rate))
    with rig_of(model, speculation=guess, page_size=4, pages=22 if scarce else 64, prefill_budget=7) as rig:
        for kind, fields in KINDS.items():
            rig.ask(PROMPTS[kind], max_tokens=ANSWER, **fields)
        rig.decode()
        assert rig.answers == by_id
        assert set(rig.finished.values()) == {FinishReason.LENGTH}
        if rate == 1 and not scarce:
            assert rig.count("kvferry_drafts_total", result="rejected") == 0
        if rate and not scarce:
            assert rig.count("kvferry_drafts_total", result="accepted") > 0


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_answers_in_bfloat16_stay_the_same_to_the_letter(tmp_path, level, architecture):
    """Where no step has more rows than the kernels take."""
    build_random(tmp_path, architecture, head_dim=16)
    model = load_model(tmp_path, "bfloat16")
    answers = [{}]
    for rate in (None, 0.5, 1):
        guess = None if rate is None else Scripted(3, 256, spoilt(answers[0], 3, rate))
        with rig_of(model, speculation=guess, prefill_budget=7) as rig:
            for kind, fields in KINDS.items():
                rig.ask(PROMPTS[kind], max_tokens=ANSWER, **fields)
            rig.decode()
            answers.append(dict(rig.answers))
        answers[0] = answers[1]
    assert answers[1] == answers[2] == answers[3]


def test_right_guesses_save_steps(model, plain):
    steps = []
    for most in (0, 3):
        with rig_of(model, speculation=Scripted(most, 256, spoilt({"0": plain["greedy"]}, 0, 1))) as rig:
            request = rig.ask(PROMPTS["greedy"], max_tokens=ANSWER)
            rig.decode()
            assert rig.answers[request.id] == plain["greedy"]
            steps.append(rig.count("kvferry_steps_total"))
            assert (request.timeline.drafted, request.timeline.accepted) == ((0, 0), (10, 10))[most > 0]
    assert steps == [ANSWER, 4]


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_no_token_after_the_last_that_was_asked_for(model, plain, asked):
    with rig_of(model, speculation=Scripted(4, 256, spoilt({"0": plain["greedy"]}, 0, 1))) as rig:
        rig.ask(PROMPTS["greedy"], max_tokens=asked)
        rig.decode()
        assert rig.answers == {"0": plain["greedy"][:asked]}


def test_an_end_token_among_right_guesses_ends_the_answer(model, plain):
    whole = plain["sampled"]
    end = next(index for index in range(3, ANSWER) if whole[index] not in whole[:index])
    with rig_of(model, speculation=Scripted(6, 256, spoilt({"0": whole, "1": whole}, 0, 1))) as rig:
        stopped = rig.ask(PROMPTS["sampled"], stop=[whole[end]], max_tokens=ANSWER, **KINDS["sampled"])
        ignored = rig.ask(PROMPTS["sampled"], stop=[whole[end]], max_tokens=ANSWER, ignore_eos=True, **KINDS["sampled"])
        rig.decode()
        assert rig.answers == {stopped.id: whole[: end + 1], ignored.id: whole}
        assert rig.finished == {stopped.id: FinishReason.STOP, ignored.id: FinishReason.LENGTH}


def test_the_context_ends_an_answer_where_it_would_without(model):
    prompt = tokens_of(20)
    answers = []
    for most in (0, 5):
        script = spoilt({"0": answers[0]}, 0, 1) if answers else None
        with rig_of(model, pages=7, speculation=Scripted(most, 28, script)) as rig:
            rig.ask(prompt, max_tokens=100)
            rig.decode()
            answers.append(rig.answers["0"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


def test_drafts_preempt_nobody_and_give_their_pages_back(model, plain):
    """A pool that is just enough for both answers is just enough with drafts."""
    by_id = {"0": plain["greedy"], "1": plain["penalised"]}
    pages = sum(-(-(len(PROMPTS[kind]) + ANSWER - 1) // 4) for kind in ("greedy", "penalised"))
    with rig_of(model, pages=pages, speculation=Scripted(6, 256, spoilt(by_id, 3, 0.3))) as rig:
        for kind in ("greedy", "penalised"):
            rig.ask(PROMPTS[kind], max_tokens=ANSWER, **KINDS[kind])
        rig.decode()
        assert rig.answers == by_id
        assert rig.scheduler.preemptions == 0


def test_a_cancel_with_drafts_in_flight_leaves_nothing(model, plain):
    with rig_of(model, speculation=Scripted(6, 256, spoilt({"0": plain["greedy"]}, 0, 1))) as rig:
        request = rig.ask(PROMPTS["greedy"], max_tokens=ANSWER)
        rig.decode(until=lambda: len(rig.answers["0"]) > 2)
        slices = rig.scheduler.plan_step()
        assert [len(piece.drafts) > 0 for piece in slices] == [True]
        rig.scheduler.end(request, State.CANCELLED)
        assert rig.allocator.held_pages > 0
        rig.scheduler.finish_step(slices)
        assert (rig.allocator.held_pages, rig.scheduler.requests) == (0, [])


def test_pages_of_rejected_guesses_are_not_shared(model, plain):
    """What others find is what was accepted: the answer read again as a prompt is computed to the same end."""
    whole = PROMPTS["both"] + plain["both"]
    with rig_of(model, speculation=Scripted(5, 256, spoilt({"0": plain["both"]}, 1, 0.4))) as rig:
        rig.ask(PROMPTS["both"], max_tokens=ANSWER, **KINDS["both"])
        rig.decode()
        again = rig.ask(whole[:-1], max_tokens=1, **KINDS["both"])
        rig.decode()
        assert again.cached == (len(whole) - 2) // 4 * 4
        found = rig.answers[again.id]
    with rig_of(model) as rig:
        fresh = rig.ask(whole[:-1], max_tokens=1, **KINDS["both"])
        rig.decode()
        assert (fresh.cached, rig.answers[fresh.id]) == (0, found)


def test_a_model_that_breaks_behind_right_guesses_fails_after_them(model, plain, monkeypatch):
    answer = plain["greedy"]
    with rig_of(model, speculation=Scripted(3, 256, spoilt({"0": answer}, 0, 1))) as rig:
        rig.ask(PROMPTS["greedy"], max_tokens=ANSWER)
        forward = rig.worker.forward

        def broken(slices):
            logits, [piece] = forward(slices).clone(), slices
            drawn = piece.start + len(piece.tokens) - piece.want_logits + 1 - len(PROMPTS["greedy"])
            logits[max(0, 6 - drawn) :] = float("nan")
            return logits

        monkeypatch.setattr(rig.worker, "forward", broken)
        rig.decode()
        assert rig.answers == {"0": answer[:6]}
        assert "not numbers" in rig.failed["0"]


def test_many_requests_share_the_rows_of_a_step():
    speculation = Speculation("ngram", 5, 256)
    assert [speculation.share(count) for count in (0, 1, 5, 6, MOST_ROWS // 2, MOST_ROWS // 2 + 1, 1000)] == [
        0, 5, 5, 4, 1, 0, 0,
    ]  # fmt: skip
    assert Speculation().share(1) == 0


def test_a_grammar_holds_behind_every_guess(tiny_model):
    """Guesses of the answer, and spoilt ones: those that the grammar forbids are not even tried."""
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "integer"}}}
    grammar = Grammar.json_schema(schema | {"required": ["a", "b"], "additionalProperties": False})
    compiler = GrammarCompiler(tiny_model, 49152)
    model, answers = load_model(tiny_model, "float32"), []
    try:
        for rate in (None, 1, 0.5):
            script = spoilt({"0": answers[0]}, 0, rate) if answers else None
            guess = Scripted(4 if answers else 0, 256, script)
            with rig_of(model, page_size=16, speculation=guess) as rig:
                matcher = compiler.compile_now(grammar, frozenset({2}))
                rig.ask(list(range(100, 120)), stop=[2], max_tokens=24, temperature=0.8, matcher=matcher)
                rig.decode()
                answers.append(rig.answers["0"])
                assert rig.failed == {}
        assert answers[0] == answers[1] == answers[2]
        assert len(answers[0]) > 8
    finally:
        compiler.close()


def test_a_grammar_that_runs_into_its_limits_within_a_guess_fails_its_own_request_alone(tiny_model, monkeypatch):
    """The grammar takes the guesses, and following them takes more than it may: the decoder goes on."""
    monkeypatch.setattr(grammar, "_limits", lambda: LLParserLimits(max_items_in_row=40))
    compiler = GrammarCompiler(tiny_model, 49152)
    a = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).token_to_id("a")
    loop = Scripted(4, 256, lambda _, most: [a] * most)
    try:
        with rig_of(load_model(tiny_model, "float32"), page_size=16, speculation=loop) as rig:
            ambiguous = Grammar.lark('start: x\nx: "a" x x | "a" x | "a"')
            matcher = compiler.compile_now(ambiguous, frozenset({2}))
            hostile = rig.ask([a], matcher=matcher, max_tokens=100, logit_bias=((a, 100.0),))
            other = rig.ask([100, 101], max_tokens=ANSWER)
            rig.decode()
            assert "max is 40" in rig.failed.pop(hostile.id)
            assert not rig.failed
            assert len(rig.answers[hostile.id]) > 4
            assert len(rig.answers[other.id]) == ANSWER
    finally:
        compiler.close()


def test_an_end_token_guessed_behind_a_whole_answer_is_not_tried(tiny_model):
    """Where end tokens are ignored they may be guessed; behind the end of a grammar nothing is taken, not even they."""
    compiler = GrammarCompiler(tiny_model, 49152)
    ab = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).token_to_id("ab")
    script = Scripted(4, 256, lambda request, _: [ab, 2, 2][request.generated :])
    try:
        with rig_of(load_model(tiny_model, "float32"), page_size=16, speculation=script) as rig:
            matcher = compiler.compile_now(Grammar.regex("ab"), frozenset({2}))
            asked = rig.ask([100], stop=[2], matcher=matcher, ignore_eos=True)
            rig.decode()
            assert (rig.answers[asked.id], rig.failed) == ([ab], {})
    finally:
        compiler.close()
