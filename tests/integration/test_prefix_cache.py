"""Prefix hits on either side and both: the same tokens as without a cache, and what moved is what was missing."""

import pytest
from kvferry_proto.errors import ErrorCode
from kvferry_proto.to_router import Finished
from local import pair

LAYERS = 3
PAGE = 8
PAGES = 5
LACKING_IS_SENT = {"local_prefill_tokens": 0}


def prompt(seed, tokens=PAGES * PAGE + 1):
    """The prompt's last token is never prefilled: five full pages, and no other."""
    return list(range(1000 * seed, 1000 * seed + tokens))


async def finished(router, decoder, tokens, **fields):
    asked = router.ask(decoder, tokens, **fields)
    outcome = await router.outcome(asked)
    assert isinstance(outcome, Finished), outcome
    return asked.tokens, outcome


@pytest.fixture
async def nodes(redis_server, tiny_model):
    async with pair(redis_server.url, tiny_model, prefix_cache=True, decoder=LACKING_IS_SENT) as three:
        yield three


def forget(node):
    """Empty a node's cache."""
    cache = node.worker.allocator
    cache.retract(list(cache._hash_of))
    assert cache.cached_pages == 0


async def test_hits_of_every_length_on_either_side_and_both(nodes, eventually):
    prefilling, decoding, router = nodes
    seed = 0
    for on_decoder in (0, 1, PAGES - 1, PAGES):
        for on_prefiller in (0, 1, PAGES - 1, PAGES):
            seed += 1
            tokens = prompt(seed)
            alone, outcome = await finished(router, decoding, tokens)
            assert outcome.usage.cached_tokens == 0
            forget(decoding)
            if on_prefiller:
                part = tokens[: PAGE * on_prefiller + 1]
                await finished(router, decoding, part, prefiller=prefilling, max_tokens=1)
                forget(decoding)
            if on_decoder:
                await finished(router, decoding, tokens[: PAGE * on_decoder + 1], max_tokens=1)
            before = prefilling.worker.fabric.stats()
            got, outcome = await finished(router, decoding, tokens, prefiller=prefilling)
            assert got == alone, (on_decoder, on_prefiller)
            moved = prefilling.worker.fabric.stats().pages - before.pages
            assert moved == LAYERS * (PAGES - on_decoder), (on_decoder, on_prefiller)
            if on_decoder == PAGES:
                assert outcome.prefiller is None
                assert outcome.usage.cached_tokens == PAGES * PAGE
            else:
                assert outcome.prefiller.pages == moved
                computed = sum(chunk.tokens for chunk in outcome.prefiller.chunks)
                assert computed == PAGE * (PAGES - on_prefiller)
                assert outcome.usage.cached_tokens == PAGE * on_prefiller
            assert outcome.usage.cached_tokens < outcome.usage.prompt_tokens
    await eventually(lambda: not prefilling.held() and not decoding.held())
    for node in (prefilling, decoding):
        node.worker.allocator.check()
        assert node.worker.page_state()["cached"] > 0


async def test_the_next_turn_of_a_chat_reuses_the_answers_pages(nodes):
    prefilling, decoding, router = nodes
    first = prompt(1, 20)
    fields = {"prefiller": prefilling, "max_tokens": 30, "ignore_eos": True}
    answer, _ = await finished(router, decoding, first, **fields)
    turn = [*first, *answer, *prompt(2, 12)]
    got, outcome = await finished(router, decoding, turn, prefiller=prefilling)
    # 49 tokens were run: 6 pages; 61 are wanted: 8 pages.
    assert outcome.prefiller.pages == LAYERS * 2
    forget(decoding)
    forget(prefilling)
    assert (await finished(router, decoding, turn))[0] == got


async def test_salts_keep_tenants_apart_on_both_sides(nodes):
    prefilling, decoding, router = nodes
    tokens = prompt(1)
    for salt, cached in (("alice", 0), ("bob", 0), ("", 0), ("alice", PAGES * PAGE)):
        _, outcome = await finished(router, decoding, tokens, prefiller=prefilling, salt=salt)
        assert outcome.usage.cached_tokens == cached


async def test_what_is_left_after_a_hit_is_computed_here_if_it_is_short(redis_server, tiny_model):
    async with pair(redis_server.url, tiny_model, prefix_cache=True) as (prefilling, decoding, router):
        tokens = prompt(1)
        await finished(router, decoding, tokens, prefiller=prefilling)
        longer = [*tokens, *prompt(2, 20)]
        got, outcome = await finished(router, decoding, longer, prefiller=prefilling)
        assert outcome.prefiller is None
        assert outcome.usage.cached_tokens == PAGES * PAGE
        forget(decoding)
        assert (await finished(router, decoding, longer))[0] == got


async def test_pages_found_different_are_not_shared(redis_server, tiny_model, eventually):
    async with pair(redis_server.url, tiny_model, prefix_cache=True, prefiller={"fault": "corrupt-write=2"}) as (
        prefilling,
        decoding,
        router,
    ):
        tokens = prompt(1)
        outcome = await router.outcome(router.ask(decoding, tokens, prefiller=prefilling))
        assert outcome.error.code is ErrorCode.VERIFY_FAILED
        assert decoding.worker.page_state()["cached"] == 0
        got, outcome = await finished(router, decoding, tokens, prefiller=prefilling)
        assert outcome.prefiller.pages == LAYERS * PAGES
        forget(decoding)
        assert (await finished(router, decoding, tokens))[0] == got
        await eventually(lambda: not prefilling.held() and not decoding.held())


async def test_a_cancelled_transfer_quarantines_its_own_pages_alone(redis_server, tiny_model, eventually):
    async with pair(redis_server.url, tiny_model, prefix_cache=True, decoder=LACKING_IS_SENT) as (
        prefilling,
        decoding,
        router,
    ):
        tokens = prompt(1)
        await finished(router, decoding, tokens[: 2 * PAGE + 1])
        # Nothing is confirmed before the prefiller's pass has let go of the pages.
        with prefilling.hold():
            asked = router.ask(decoding, tokens, prefiller=prefilling)
            await eventually(lambda: prefilling.held().get("active_transfers"))
            router.cancel(asked)
            await router.outcome(asked)
            state = decoding.worker.page_state()
            assert (state["cached"], state["quarantined"]) == (2, 4)
        await eventually(lambda: not prefilling.held() and not decoding.held(), 30)
        assert decoding.worker.page_state()["cached"] == 2
        decoding.worker.allocator.check()
