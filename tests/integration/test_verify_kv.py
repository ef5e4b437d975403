"""--verify-kv: a byte that changes in flight is found, named, and fails the request."""

import re

import pytest
from kvferry_proto.errors import ErrorCode, Phase
from kvferry_proto.message import RequestFailed
from kvferry_proto.to_router import Finished
from local import pair

TOKENS = list(range(100, 141))


@pytest.mark.parametrize("provider", ["tcp", "net", "shm", "local"])
async def test_a_corrupted_byte_is_caught_named_and_fails_the_request(redis_server, tiny_model, provider):
    async with pair(redis_server.url, tiny_model, provider=provider, prefiller={"fault": "corrupt-write=2"}) as (
        prefilling,
        decoding,
        router,
    ):
        outcome = await router.outcome(router.ask(decoding, TOKENS, prefiller=prefilling))
        assert isinstance(outcome, RequestFailed)
        assert (outcome.error.code, outcome.error.phase) == (ErrorCode.VERIFY_FAILED, Phase.TRANSFER)
        assert re.search(r"page \d of the prompt differs in layer \d", outcome.error.message)
        assert "prefiller p" in outcome.error.message
        assert not router.requests[outcome.request_id].tokens
        # The next request is sent whole: only one write was to be corrupted.
        outcome = await router.outcome(router.ask(decoding, TOKENS, prefiller=prefilling))
        assert isinstance(outcome, Finished)
        assert (decoding.held(), prefilling.held()) == ({}, {})


async def test_the_answer_is_the_same_whoever_prefills(redis_server, tiny_model):
    async with pair(redis_server.url, tiny_model) as (prefilling, decoding, router):
        sent = router.ask(decoding, TOKENS, prefiller=prefilling, max_tokens=12)
        alone = router.ask(decoding, TOKENS, max_tokens=12)
        for asked in (sent, alone):
            assert isinstance(await router.outcome(asked), Finished)
        assert len(sent.tokens) == 12
        assert sent.tokens == alone.tokens
