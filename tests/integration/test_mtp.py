"""The drafting layer on a decoder: the same answers, and the same guesses wherever the prompt was prefilled."""

import click
import pytest
from decode_rig import Rig, one_thread
from engine_runner import tokens_of
from kvferry_decoder.cli import command
from kvferry_decoder.speculation import Speculation
from kvferry_engine.weights import load_model
from kvferry_proto.errors import ErrorCode
from kvferry_proto.message import RequestFailed
from kvferry_proto.nodes import NodeRef, Peer
from kvferry_proto.to_router import Cancelled, Finished
from local import pair
from tiny_deepseek import build_guessing, save

one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)

ANSWER = 24
SAMPLED = {"temperature": 0.3, "seed": 3}
PREFILLER = Peer(ref=NodeRef("p", 1), endpoint="tcp://127.0.0.1:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guessing")
    reference, drafter = build_guessing()
    save(reference, folder, drafter)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, "float32")


def decode(model, prompts, *, guesses=0, receive=None, pages=64, **sampling):
    """Answers, what was guessed after each step, and (drafted, accepted) of each prompt."""
    way = "mtp" if guesses else "off"
    rig = Rig(model, page_size=8, pages=pages, speculation=Speculation(way, guesses, 256))
    try:
        if receive is not None:
            rig.receiving = receive
        asked = [
            rig.ask(prompt, max_tokens=ANSWER, prefiller=None if receive is None else PREFILLER, **sampling)
            for prompt in prompts
        ]
        rig.decode()
        assert (rig.scheduler.preemptions > 0) == (pages < 20)
        rig.allocator.check()
        assert rig.allocator.held_pages == 0
        return (
            [rig.answers[request.id] for request in asked],
            [rig.guesses[request.id] for request in asked],
            [(request.timeline.drafted, request.timeline.accepted) for request in asked],
        )
    finally:
        rig.close()


PROMPTS = [tokens_of(length, seed=length) for length in (2, 9, 17, 18, 30)]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_answers_stay_the_same_and_some_guesses_are_right(model, sampling):
    plain, _, none = decode(model, PROMPTS, **sampling)
    assert none == [(0, 0)] * len(PROMPTS)
    for guesses in (1, 3):
        answers, _, counts = decode(model, PROMPTS, guesses=guesses, **sampling)
        assert answers == plain
        drafted, accepted = map(sum, zip(*counts, strict=True))
        assert drafted / 10 < accepted < drafted


def test_guesses_are_those_of_a_prompt_that_was_prefilled_here(model):
    for guesses in (1, 3):
        here = decode(model, PROMPTS, guesses=guesses)
        for chunk in (64, 5):
            assert decode(model, PROMPTS, guesses=guesses, receive={"chunk": chunk}) == here
        # The hidden state matters: without it some guess is another.
        without = decode(model, PROMPTS, guesses=guesses, receive={"with_context": False})
        assert without[0] == here[0]
        assert without[1] != here[1]


def test_preempted_answers_stay_the_same(model):
    plain, *_ = decode(model, PROMPTS)
    for receive in (None, {}):
        answers, _, counts = decode(model, PROMPTS, guesses=3, receive=receive, pages=12)
        assert answers == plain
        assert sum(accepted for _, accepted in counts) > 0


async def ask(router, decoder, prompt, prefiller=None):
    asked = router.ask(decoder, prompt, prefiller=prefiller, max_tokens=ANSWER, ignore_eos=True)
    end = await router.outcome(asked)
    assert isinstance(end, Finished), end
    return asked.tokens, end


@pytest.mark.parametrize(("cached", "provider"), [(False, "local"), (True, "auto")], ids=["cold", "cached"])
async def test_acceptance_is_the_same_with_a_prefiller_as_without(redis_server, folder, eventually, cached, provider):
    """Over real nodes and a real fabric, hidden states verified; with and without pages that are there already."""
    decoder = {"speculate": "mtp", "draft_tokens": 2, "prefill_budget": 7, "prefix_cache": False}
    prefiller = {"chunk_size": 11, "prefix_cache": cached}
    nodes = pair(redis_server.url, folder, decoder=decoder, prefiller=prefiller, provider=provider)
    async with nodes as (prefilling, decoding, router):
        right = 0
        for prompt in PROMPTS:
            alone, by_itself = await ask(router, decoding, prompt)
            for _ in range(1 + cached):
                tokens, end = await ask(router, decoding, prompt, prefilling)
                assert tokens == alone
                counts = [(each.decoder.drafted, each.decoder.accepted) for each in (end, by_itself)]
                assert counts[0] == counts[1]
            right += end.usage.accepted_prediction_tokens
            assert end.usage.rejected_prediction_tokens == end.decoder.drafted - end.decoder.accepted
            # Every page of every layer, and one hidden state.
            pages = -(-(len(prompt) - 1) // 8)
            assert end.prefiller.pages == pages * 4 + 1
            assert end.prefiller.cached == (len(prompt) - 2) // 8 * 8 * cached
            # Another decoder has lost its answer half-way, guesses in flight.
            rest = router.ask(
                decoding, prompt + alone[:9], prefiller=prefilling, answered=9, max_tokens=ANSWER - 9, ignore_eos=True
            )
            assert isinstance(await router.outcome(rest), Finished)
            assert rest.tokens == alone[9:]
        assert right > 10
        await eventually(lambda: not prefilling.held() and not decoding.held())


async def test_hidden_states_of_cancelled_and_spoilt_transfers(redis_server, folder, eventually, monkeypatch):
    decoder = {"speculate": "mtp"}
    async with pair(redis_server.url, folder, decoder=decoder) as (prefilling, decoding, router):
        alone, _ = await ask(router, decoding, PROMPTS[4])
        for _ in range(4):
            asked = router.ask(decoding, PROMPTS[4], prefiller=prefilling)
            router.cancel(asked)
            assert isinstance(await router.outcome(asked), Cancelled)
        contexts = prefilling.service._sender.contexts
        checksum = contexts.checksum
        monkeypatch.setattr(contexts, "checksum", lambda request: checksum(request) ^ 1)
        end = await router.outcome(router.ask(decoding, PROMPTS[4], prefiller=prefilling))
        assert isinstance(end, RequestFailed)
        assert end.error.code is ErrorCode.VERIFY_FAILED
        assert "hidden state" in end.error.message
        monkeypatch.undo()
        assert (await ask(router, decoding, PROMPTS[4], prefilling))[0] == alone
        await eventually(lambda: not prefilling.held() and not decoding.held())
        assert len(contexts._free) == prefilling.node.settings.max_running


def test_a_model_without_a_drafting_layer_is_refused_before_it_is_loaded(tiny_model):
    with pytest.raises(click.UsageError, match=r"--speculate mtp: .* no drafting layer"):
        command.check(["--model", str(tiny_model), "--speculate", "mtp"])
