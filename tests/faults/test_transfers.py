"""Transfers that are cancelled, fail, lose their peer or their time: every state has an exit that frees."""

import asyncio
import random

import pytest
from kvferry_proto.errors import ErrorCode, Phase
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Refused, RequestFailed
from kvferry_proto.nodes import NodeRef
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_decoder import Assign
from kvferry_proto.to_router import Cancelled, Finished
from local import pair, start_prefiller
from wire import Wire

pytestmark = pytest.mark.faults

LONG = list(range(100, 180))
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}
"""An answer that is certainly not complete when it is cancelled, however late that comes."""


async def idle(*nodes, eventually):
    await eventually(lambda: not any(node.held() for node in nodes))
    for node in nodes:
        node.worker.allocator.check()


@pytest.mark.parametrize("moment", [0, 0.02, 0.1, 0.25, 0.4])
async def test_cancelled_while_the_prefiller_works_and_writes(redis_server, tiny_model, eventually, moment):
    fault = "slow-layer-ms=60,delay-write-ms=80"
    async with pair(redis_server.url, tiny_model, prefiller={"chunk_size": 40, "fault": fault}) as (
        prefilling,
        decoding,
        router,
    ):
        asked = router.ask(decoding, LONG, prefiller=prefilling, **ENDLESS)
        await asyncio.sleep(moment)
        router.cancel(asked)
        assert isinstance(await router.outcome(asked), Cancelled)
        await idle(prefilling, decoding, eventually=eventually)
        after = router.ask(decoding, LONG, prefiller=prefilling)
        alone = router.ask(decoding, LONG)
        assert isinstance(await router.outcome(after), Finished)
        assert isinstance(await router.outcome(alone), Finished)
        assert after.tokens == alone.tokens


async def test_pages_of_a_cancelled_transfer_are_not_reused_while_writes_are_in_flight(
    redis_server, tiny_model, eventually
):
    async with pair(redis_server.url, tiny_model, prefiller={"fault": "delay-write-ms=1500"}) as (
        prefilling,
        decoding,
        router,
    ):
        asked = router.ask(decoding, LONG, prefiller=prefilling, **ENDLESS)
        await asked.accepted.wait()
        await eventually(lambda: prefilling.held().get("active_transfers"))
        router.cancel(asked)
        assert isinstance(await router.outcome(asked), Cancelled)
        book = decoding.worker.allocator
        assert book.held_pages == 0
        assert book.quarantined_pages in (0, 10)
        await idle(prefilling, decoding, eventually=eventually)
        assert book.quarantined_pages == 0


async def test_a_write_that_fails_fails_the_request_at_both_ends(redis_server, tiny_model, eventually):
    async with pair(redis_server.url, tiny_model, prefiller={"fault": "fail-write=2"}) as (
        prefilling,
        decoding,
        router,
    ):
        outcome = await router.outcome(router.ask(decoding, LONG, prefiller=prefilling))
        assert isinstance(outcome, RequestFailed)
        assert (outcome.error.code, outcome.error.phase) == (ErrorCode.TRANSFER_FAILED, Phase.TRANSFER)
        assert outcome.error.node == "p"
        await idle(prefilling, decoding, eventually=eventually)
        assert isinstance(await router.outcome(router.ask(decoding, LONG, prefiller=prefilling)), Finished)


async def test_a_lost_prefiller_fails_its_requests_by_name_and_its_pages_come_back(
    redis_server, tiny_model, eventually
):
    async with pair(redis_server.url, tiny_model) as (prefilling, decoding, router):
        with prefilling.hold():
            asked = router.ask(decoding, LONG, prefiller=prefilling)
            await eventually(lambda: prefilling.held().get("active_transfers"))
            await prefilling.die()
        outcome = await router.outcome(asked)
        assert isinstance(outcome, RequestFailed)
        assert (outcome.error.code, outcome.error.node) == (ErrorCode.NODE_LOST, "p")
        await idle(decoding, eventually=eventually)
        # The same name, another life.
        again = start_prefiller(redis_server.url, tiny_model)
        await again.ready()
        assert isinstance(await router.outcome(router.ask(decoding, LONG, prefiller=again)), Finished)
        await again.end()


async def test_what_a_prefiller_said_while_its_connection_was_broken_is_not_waited_for(
    redis_server, tiny_model, eventually
):
    """The KV comes, and the checksums never do."""
    async with (
        pair(redis_server.url, tiny_model) as (prefilling, decoding, router),
        Wire(prefilling.service_endpoint) as wire,
    ):
        prefilling.service_endpoint = wire.endpoint
        with prefilling.hold():
            asked = router.ask(decoding, LONG, prefiller=prefilling)
            await eventually(lambda: prefilling.held().get("active_transfers"))
            await wire.cut()
        await idle(prefilling, eventually=eventually)
        await wire.mend()
        outcome = await router.outcome(asked)
        assert (outcome.error.code, outcome.error.node) == (ErrorCode.NODE_LOST, "p")
        assert not outcome.error.avoid, "both nodes live"
        await idle(prefilling, decoding, eventually=eventually)
        assert isinstance(await router.outcome(router.ask(decoding, LONG, prefiller=prefilling)), Finished)


async def test_a_lost_decoder_costs_the_prefiller_nothing(redis_server, tiny_model, eventually):
    async with pair(redis_server.url, tiny_model) as (prefilling, decoding, router):
        with prefilling.hold():
            router.ask(decoding, LONG, prefiller=prefilling)
            await eventually(lambda: prefilling.held().get("active_transfers"))
            await decoding.die()
        await idle(prefilling, eventually=eventually)


async def test_kv_that_does_not_come_in_time_fails_the_request(redis_server, tiny_model, eventually):
    async with pair(
        redis_server.url,
        tiny_model,
        prefiller={"fault": "slow-layer-ms=1000"},
        decoder={"transfer_seconds": 0.5},
    ) as (prefilling, decoding, router):
        outcome = await router.outcome(router.ask(decoding, LONG, prefiller=prefilling))
        assert isinstance(outcome, RequestFailed)
        assert (outcome.error.code, outcome.error.phase) == (ErrorCode.TIMEOUT, Phase.TRANSFER)
        await idle(prefilling, decoding, eventually=eventually)


async def test_nodes_whose_pages_do_not_fit_are_refused_when_they_meet(redis_server, tiny_model, eventually):
    async with pair(redis_server.url, tiny_model, prefiller={"page_size": 16}, decoder={"page_size": 8}) as (
        prefilling,
        decoding,
        router,
    ):
        outcome = await router.outcome(router.ask(decoding, LONG, prefiller=prefilling))
        assert outcome.error.code is ErrorCode.LAYOUT_MISMATCH
        assert "page_size" in outcome.error.message
        assert "8" in outcome.error.message
        assert "16" in outcome.error.message
        await idle(prefilling, decoding, eventually=eventually)


async def test_a_message_for_an_earlier_life_is_refused(redis_server, tiny_model, eventually):
    async with pair(redis_server.url, tiny_model) as (_, decoding, router):
        record = decoding.node._record(decoding.worker, decoding.service_endpoint, "")
        before = type(record.peer)(ref=NodeRef("d", record.ref.incarnation + 1), endpoint=record.endpoint)
        sampling = SamplingParams()
        router.post.to(before).send(
            Assign(request_id="x", tokens=Int32s([1]), page_table=Int32s(), sampling=sampling, stop_token_ids=[])
        )
        await eventually(lambda: router.refused)
        assert isinstance(router.refused[0], Refused)
        assert (router.refused[0].reason, router.refused[0].about) == ("stale", "x")


async def test_one_token_never_touches_a_prefiller(redis_server, tiny_model):
    async with pair(redis_server.url, tiny_model) as (prefilling, decoding, router):
        outcome = await router.outcome(router.ask(decoding, [500], prefiller=prefilling, ignore_eos=True))
        assert isinstance(outcome, Finished)
        assert outcome.prefiller is None
        assert prefilling.service.held()["requests"] == 0
        assert prefilling.node.metrics.registry.get_sample_value("kvferry_steps_total") == 0


async def test_a_full_queue_refuses_at_once(redis_server, tiny_model, eventually):
    async with pair(redis_server.url, tiny_model, decoder={"max_running": 1, "max_waiting": 1}) as (
        prefilling,
        decoding,
        router,
    ):
        with decoding.hold():
            asked = [router.ask(decoding, LONG, max_tokens=30, ignore_eos=True)]
            await asked[0].accepted.wait()
            asked += [router.ask(decoding, LONG, max_tokens=30, ignore_eos=True) for _ in range(5)]
            await eventually(lambda: sum(each.ended.is_set() for each in asked) == 4)
        outcomes = [await router.outcome(each) for each in asked]
        refused = [each for each in outcomes if isinstance(each, RequestFailed)]
        assert len(refused) == 4
        assert {each.error.code for each in refused} == {ErrorCode.OVERLOADED}
        assert all(each.error.retry_after for each in refused)
        assert sum(isinstance(each, Finished) for each in outcomes) == 2
        await idle(prefilling, decoding, eventually=eventually)


async def test_a_preempted_answer_is_the_same_as_an_undisturbed_one(redis_server, tiny_model, eventually):
    prompts = [list(range(100 + i, 140 + i)) for i in range(4)]
    page = 3 * 2 * 2 * 8 * 16 * 4
    async with pair(
        redis_server.url, tiny_model, prefiller={"kv_memory": 8 << 20}, decoder={"kv_memory": 26 * page}
    ) as (prefilling, decoding, router):
        fields = {"prefiller": prefilling, "max_tokens": 60, "ignore_eos": True}
        with decoding.hold():
            crowd = [router.ask(decoding, prompt, **fields) for prompt in prompts]
            await eventually(lambda: all(asked.accepted.is_set() for asked in crowd))
        for asked in crowd:
            assert isinstance(await router.outcome(asked), Finished)
        assert decoding.service.scheduler.preemptions > 0
        for asked, prompt in zip(crowd, prompts, strict=True):
            alone = router.ask(decoding, prompt, **fields)
            assert isinstance(await router.outcome(alone), Finished)
            assert len(alone.tokens) == 60
            assert asked.tokens == alone.tokens
        await idle(prefilling, decoding, eventually=eventually)


async def test_sigterm_lets_a_running_answer_end_and_takes_nothing_new(redis_server, tiny_model, eventually):
    async with pair(redis_server.url, tiny_model) as (prefilling, decoding, router):
        with decoding.hold():
            asked = router.ask(decoding, LONG, prefiller=prefilling, max_tokens=150, ignore_eos=True)
            await asked.accepted.wait()
            decoding.stop.request("test")
            await eventually(lambda: decoding.service.draining)
            late = router.ask(decoding, LONG)
            assert (await router.outcome(late)).error.code is ErrorCode.DRAINING
        assert isinstance(await router.outcome(asked), Finished)
        assert len(asked.tokens) == 150
        await asyncio.wait_for(decoding.task, 30)


@pytest.mark.parametrize("provider", ["tcp", "shm", "local"])
async def test_golden_answers_hold_through_random_cancels_and_slow_writes(
    redis_server, tiny_model, eventually, provider
):
    """A tiny pool, so that pages change hands at once: the first answers and the last must agree."""
    draw = random.Random(5)
    prompts = [[draw.randrange(100, 40_000) for _ in range(n)] for n in (9, 16, 17, 40, 65)]
    page = 3 * 2 * 2 * 8 * 16 * 4
    async with pair(
        redis_server.url,
        tiny_model,
        provider=provider,
        kv_memory=24 * page,
        prefiller={"chunk_size": 24, "fault": "delay-write-ms=3"},
        decoder={"max_running": 6},
    ) as (prefilling, decoding, router):

        async def golden():
            asked = [router.ask(decoding, prompt, prefiller=prefilling, max_tokens=5) for prompt in prompts]
            for each in asked:
                assert isinstance(await router.outcome(each), Finished)
            return [each.tokens for each in asked]

        first = await golden()
        for _ in range(15):
            crowd = [
                router.ask(decoding, draw.choice(prompts), prefiller=draw.choice([prefilling, None]), max_tokens=5)
                for _ in range(6)
            ]
            for asked in draw.sample(crowd, 3):
                await asyncio.sleep(draw.random() * 0.03)
                router.cancel(asked)
            for asked in crowd:
                assert isinstance(await router.outcome(asked), (Finished, Cancelled))
        assert await golden() == first
        await idle(prefilling, decoding, eventually=eventually)
