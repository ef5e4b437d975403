"""Latents (MLA) travel as keys and values do, the drafting layer's too."""

import pytest
import torch
from kvferry_proto.message import RequestFailed
from kvferry_proto.to_router import Finished
from local import pair
from tiny_model import make_tiny_deepseek
from transformers import DeepseekV3ForCausalLM

TOKENS = list(range(100, 141))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory, default_model):
    return make_tiny_deepseek(tmp_path_factory.mktemp("deepseek"), default_model)


@pytest.mark.parametrize("page_size", [8, 16])
async def test_the_answer_is_the_references_whoever_prefills(redis_server, deepseek, page_size):
    reference = DeepseekV3ForCausalLM.from_pretrained(deepseek)
    answer = reference.generate(torch.tensor([TOKENS]), max_new_tokens=12, do_sample=False, pad_token_id=2)
    expected = answer[0, len(TOKENS) :].tolist()
    chunks = {"chunk_size": 16}
    async with pair(redis_server.url, deepseek, page_size=page_size, prefiller=chunks) as (
        prefilling,
        decoding,
        router,
    ):
        layout = decoding.worker.layout
        assert (layout.layers, layout.kv_heads, layout.latent) == (4, 1, True)
        sent = router.ask(decoding, TOKENS, prefiller=prefilling, max_tokens=12, ignore_eos=True)
        alone = router.ask(decoding, TOKENS, max_tokens=12, ignore_eos=True)
        for asked in (sent, alone):
            assert isinstance(await router.outcome(asked), Finished)
        assert sent.tokens == alone.tokens == expected
        pages = layout.layers * layout.pages_for(len(TOKENS) - 1)
        moved = prefilling.worker.fabric.stats()
        assert (moved.pages, moved.bytes) == (pages, pages * page_size * layout.head_dim * 4)
        assert (decoding.held(), prefilling.held()) == ({}, {})


async def test_a_corrupted_byte_of_a_latent_is_found(redis_server, deepseek):
    async with pair(redis_server.url, deepseek, prefiller={"fault": "corrupt-write=2"}) as (
        prefilling,
        decoding,
        router,
    ):
        outcome = await router.outcome(router.ask(decoding, TOKENS, prefiller=prefilling))
        assert isinstance(outcome, RequestFailed)
        assert "of the prompt differs in layer" in outcome.error.message
