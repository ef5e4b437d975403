"""Models split over tensor-parallel ranks against transformers on the same folder, in float32."""

import time

import pytest
import torch
from engine_runner import VOCABULARY, Runner, close, reference_logits, tokens_of
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError
from kvferry_engine.shard import Shard
from kvferry_engine.split import check_ranks
from kvferry_engine.weights import load_model
from random_models import build_random
from rank_threads import RankThreads

pytestmark = pytest.mark.oracle

ODD = {"num_attention_heads": 6, "hidden_size": 96}
# Architecture, ranks, KV heads, and what else the configuration says; a vocabulary of 199 never divides.
SETUPS = {
    "heads divide": ("llama", 2, 2, {}),
    "a KV head on two ranks": ("llama", 4, 2, {}),
    "a head a rank, tied": ("llama", 4, 4, {"tie_word_embeddings": True}),
    "biases": ("llama", 2, 4, {"attention_bias": True, "mlp_bias": True}),
    "odd heads": ("llama", 3, 3, ODD),
    "one KV head, tied": ("qwen3", 4, 1, {"tie_word_embeddings": True}),
    "normalised heads, biases": ("qwen3", 2, 2, {"attention_bias": True}),
    "experts": ("qwen3_moe", 2, 2, {}),
    "experts on four ranks": ("qwen3_moe", 4, 4, {"mlp_only_layers": [1]}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_ranks_together_are_the_whole_model(tmp_path, setup):
    kind, ranks, kv_heads, fields = setup
    reference = build_random(tmp_path, kind, kv_heads=kv_heads, **fields)
    tokens, other = tokens_of(60), tokens_of(25, seed=1)
    expected, of_other = reference_logits(reference, tokens), reference_logits(reference, other)
    together = RankThreads(tmp_path, ranks, page_size=8, pages=14)
    try:
        sequence, second = together.sequence(tokens), together.sequence(other)
        close(together.step(sequence.next(37))[0], expected[36])
        logits = together.step(sequence.next(22), second.next(24))
        close(logits, torch.stack((expected[58], of_other[23])))
        assert together.step(sequence.next(1), second.next(1), logits=False) is None
        _same_cache(together, tmp_path, sequence, second)
    finally:
        together.close()


def _same_cache(together, folder, *sequences):
    """Every rank's pages hold what its heads' pages hold in the whole model's cache."""
    whole = Runner(load_model(folder, "float32"), page_size=8, pages=14)
    for sequence in sequences:
        sequence.done = 0
    whole.step(*(sequence.next(len(sequence.tokens)) for sequence in sequences))
    layout = together.layout
    for rank, runner in enumerate(together.runners):
        heads = slice(layout.first_head(rank), layout.first_head(rank) + layout.heads_per_rank)
        for sequence in sequences:
            full = [page for at, page in enumerate(sequence.pages) if (at + 1) * 8 <= len(sequence.tokens)]
            close(runner.pool.tensor[:, full], whole.pool.tensor[:, full, heads])


def test_a_layer_is_done_when_all_ranks_have_written_it(tmp_path):
    """The lead's word lets the fabric read every rank's pool."""
    build_random(tmp_path, "llama")
    together = RankThreads(tmp_path, 2, page_size=8, pages=4)
    for layer in together.runners[1].model.layers:
        layer.attention = slowed(layer.attention)
    sequence, seen = together.sequence(tokens_of(16)), []

    def on_layer(layer):
        written = [runner.pool.tensor[layer, sequence.pages] for runner in together.runners]
        seen.append((layer, [bool(pages.isfinite().all()) for pages in written]))

    try:
        together.step(sequence.next(16), on_layer=on_layer)
    finally:
        together.close()
    assert seen == [(layer, [True, True]) for layer in range(3)]


def slowed(work):
    def late(*args):
        time.sleep(0.05)
        return work(*args)

    return late


def test_experts_stored_in_one_tensor_are_read_in_slices(tmp_path):
    for form, original in (("parts", True), ("whole", False)):
        build_random(tmp_path / form, "qwen3_moe", save_original_format=original)
    for rank in range(2):
        shard = Shard(rank, 2)
        parts, whole = (
            load_model(tmp_path / form, "float32", shard=shard).parameters.targets for form in ("parts", "whole")
        )
        assert parts.keys() == whole.keys()
        for name, target in parts.items():
            assert torch.equal(target, whole[name]), name


def test_a_rank_holds_its_part_alone(tmp_path):
    build_random(tmp_path, "llama", kv_heads=4)
    whole = load_model(tmp_path, "float32").parameters
    seen = {}
    for rank in range(4):
        model = load_model(tmp_path, "float32", shard=Shard(rank, 4))
        for name, part in model.parameters.slices.items():
            assert torch.equal(model.parameters.targets[name], whole.targets[name][part.index]), name
            seen[name] = seen.get(name, 0) + model.parameters.targets[name].numel()
    assert seen == {name: whole.targets[name].numel() for name in seen}
    assert {name.split(".")[-2] for name in seen} == {
        "embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ranks", "fields", "what"),
    [
        (
            "llama",
            2,
            {"kv_heads": 3, "num_attention_heads": 6, "hidden_size": 96},
            "3 KV heads cannot be split over 2 ranks",
        ),
        ("llama", 3, {"kv_heads": 1, "num_attention_heads": 4}, "attention heads 4 cannot be split over 3 ranks"),
        ("llama", 2, {"intermediate_size": 95}, "intermediate_size 95 cannot be split over 2 ranks"),
        ("qwen3_moe", 4, {"moe_intermediate_size": 42, "kv_heads": 4}, "moe_intermediate_size 42 cannot .* 4 ranks"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_refused_with_both_numbers(tmp_path, kind, ranks, fields, what):
    build_random(tmp_path, kind, **fields)
    with pytest.raises(ModelError, match=what):
        check_ranks(ModelConfig.from_folder(tmp_path), ranks)
    with pytest.raises(ModelError, match=what):
        load_model(tmp_path, "float32", shard=Shard(1, ranks))


def test_an_intermediate_size_that_no_layer_has_may_be_anything(tmp_path):
    build_random(tmp_path, "qwen3_moe", intermediate_size=95)
    check_ranks(ModelConfig.from_folder(tmp_path), 2)
    assert VOCABULARY % 2
