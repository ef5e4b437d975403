"""KV leaves layer by layer, and never before its layer's counter has moved."""

import asyncio

import pytest
from kvferry_proto.to_router import Finished
from local import pair

pytestmark = pytest.mark.timeout(120)

LAYERS = 3
PAGES = 5


async def watch(prefilling, decoding, samples):
    """Record (layers that the model has finished, pages that have arrived) until cancelled."""
    counter, fabric = prefilling.worker.counter, decoding.worker.fabric
    start = counter.value
    while True:
        for transfer in decoding.service.receiver.transfers:
            # The arrivals are read first: what came in between can only make the layer count larger.
            arrived = fabric.arrived(transfer.slot.number)
            samples.append((counter.value - start, arrived))
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("provider", ["tcp", "net", "shm", "local"])
async def test_the_first_layers_pages_arrive_before_the_last_layer_has_run(redis_server, tiny_model, provider):
    tokens = list(range(100, 100 + 8 * PAGES + 1))
    async with pair(redis_server.url, tiny_model, provider=provider, prefiller={"fault": "slow-layer-ms=300"}) as (
        prefilling,
        decoding,
        router,
    ):
        samples = []
        watching = asyncio.ensure_future(watch(prefilling, decoding, samples))
        outcome = await router.outcome(router.ask(decoding, tokens, prefiller=prefilling))
        watching.cancel()
        assert isinstance(outcome, Finished)
        assert all(arrived <= layers * PAGES for layers, arrived in samples), samples
        early = [arrived for layers, arrived in samples if 0 < layers < LAYERS]
        assert PAGES in early, "nothing of layer 0 had arrived while later layers were still to run"
        assert outcome.prefiller.pages == LAYERS * PAGES


async def test_chunks_of_a_long_prompt_are_sent_while_later_chunks_are_computed(redis_server, tiny_model):
    tokens = list(range(100, 165))
    async with pair(redis_server.url, tiny_model, prefiller={"chunk_size": 16, "fault": "slow-layer-ms=50"}) as (
        prefilling,
        decoding,
        router,
    ):
        samples = []
        watching = asyncio.ensure_future(watch(prefilling, decoding, samples))
        outcome = await router.outcome(router.ask(decoding, tokens, prefiller=prefilling))
        watching.cancel()
        assert isinstance(outcome, Finished)
        assert [chunk.tokens for chunk in outcome.prefiller.chunks] == [16, 16, 16, 16]
        # Two pages a chunk and layer: after the first chunk's three layers, six pages may have come, not more.
        assert all(arrived <= layers * 2 for layers, arrived in samples), samples
        assert any(arrived == 2 * LAYERS and layers < 2 * LAYERS for layers, arrived in samples), samples


async def test_a_node_that_has_warmed_up_begins_as_if_it_had_not(redis_server, tiny_model):
    tokens = list(range(100, 130))
    answers = []
    for warm in (False, True):
        async with pair(redis_server.url, tiny_model) as (prefilling, decoding, router):
            for node in (prefilling, decoding) if warm else ():
                await node.worker.compute(node.worker.warm_up)
                assert node.worker.page_state()["held"] == 0
            asked = router.ask(decoding, tokens, prefiller=prefilling)
            assert isinstance(await router.outcome(asked), Finished)
            answers.append(asked.tokens)
    assert len(answers[0]) == 4
    assert answers[0] == answers[1]
