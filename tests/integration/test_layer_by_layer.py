"""KV leaves layer by layer, and never before its layer's counter has moved."""

import asyncio
import contextlib
import itertools
import threading

import pytest
from kvferry_proto.to_router import Finished
from local import pair

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


@contextlib.contextmanager
def paused_after(prefilling, layers):
    """The model pauses when so many layers are done, until the block ends."""
    worker, go = prefilling.worker, threading.Event()
    on_layer, done = worker.on_layer, itertools.count(1)

    def pausing(layer):
        on_layer(layer)
        if next(done) == layers:
            go.wait()

    worker.on_layer = pausing
    try:
        yield
    finally:
        go.set()


@pytest.mark.parametrize("provider", ["tcp", "net", "shm", "local"])
async def test_the_first_layers_pages_arrive_before_the_last_layer_has_run(
    redis_server, tiny_model, eventually, provider
):
    tokens = list(range(100, 100 + 8 * PAGES + 1))
    async with pair(redis_server.url, tiny_model, provider=provider) as (prefilling, decoding, router):
        samples = []
        watching = asyncio.ensure_future(watch(prefilling, decoding, samples))
        with paused_after(prefilling, 1):
            asked = router.ask(decoding, tokens, prefiller=prefilling)
            await eventually(lambda: (1, PAGES) in samples)
        outcome = await router.outcome(asked)
        watching.cancel()
        assert isinstance(outcome, Finished)
        assert all(arrived <= layers * PAGES for layers, arrived in samples), samples
        assert outcome.prefiller.pages == LAYERS * PAGES


async def test_chunks_of_a_long_prompt_are_sent_while_later_chunks_are_computed(redis_server, tiny_model, eventually):
    tokens = list(range(100, 165))
    async with pair(redis_server.url, tiny_model, prefiller={"chunk_size": 16}) as (prefilling, decoding, router):
        samples = []
        watching = asyncio.ensure_future(watch(prefilling, decoding, samples))
        with paused_after(prefilling, LAYERS + 1):
            asked = router.ask(decoding, tokens, prefiller=prefilling)
            await eventually(lambda: (LAYERS + 1, 2 * (LAYERS + 1)) in samples)
        outcome = await router.outcome(asked)
        watching.cancel()
        assert isinstance(outcome, Finished)
        assert [chunk.tokens for chunk in outcome.prefiller.chunks] == [16, 16, 16, 16]
        # Two pages a chunk and layer: after the first chunk's three layers, six pages may have come, not more.
        assert all(arrived <= layers * 2 for layers, arrived in samples), samples


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
