"""Penalties and biases on a decoder, over its real sockets: right from the first token, and right after a replay."""

from collections import Counter

from kvferry_proto.to_router import Finished
from local import pair

PROMPT = list(range(100, 117))
PENALISED = {
    "frequency_penalty": 2.0,
    "presence_penalty": 1.5,
    "repetition_penalty": 1.3,
    "logit_bias": ((100, 90.0), (7, 89.0), (8, 88.5)),
}


async def ask(router, decoder, tokens, **fields):
    asked = router.ask(decoder, tokens, **fields)
    assert isinstance(await router.outcome(asked), Finished)
    return asked.tokens


async def test_penalties_hold_over_steps_replays_and_preemptions(redis_server, tiny_model):
    # 96 pages of 8 tokens for three answers of 40: some are preempted and computed again.
    memory = 14 * 3 * 2 * 2 * 16 * 4 * 8
    async with pair(redis_server.url, tiny_model, decoder={"kv_memory": memory, "prefill_budget": 64}) as (
        _,
        node,
        router,
    ):
        biased = await ask(router, node, PROMPT, logit_bias=((7, 100.0),), max_tokens=3)
        assert biased == [7, 7, 7]
        whole = await ask(router, node, PROMPT, max_tokens=40, **PENALISED)
        # Undisturbed the first would win for ever; with each turn it falls behind the others.
        assert set(whole[:12]) == {7, 8, 100}
        assert max(Counter(whole).values()) < 20
        # What another decoder had answered counts as answer, not as prompt.
        rest = await ask(router, node, PROMPT + whole[:9], answered=9, max_tokens=31, **PENALISED)
        assert rest == whole[9:]
        assert node.service.scheduler.preemptions == 0
        several = [router.ask(node, PROMPT, max_tokens=40, **PENALISED) for _ in range(3)]
        for asked in several:
            assert isinstance(await router.outcome(asked), Finished)
            assert asked.tokens == whole
        assert node.service.scheduler.preemptions > 0
