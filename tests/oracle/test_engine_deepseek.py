"""DeepSeek-V3 over the paged cache of latents against transformers on the same folder, in float32."""

import json

import pytest
import torch
from decode_rig import one_thread
from engine_runner import Runner, close, reference_logits, tokens_of
from kvferry_engine.attention import decode_groups, latent_cpu
from kvferry_engine.errors import ModelError
from kvferry_engine.shard import Shard
from kvferry_engine.weights import load_model
from oracle_checks import check_greedy, check_last, check_mixed, check_prefill
from rank_threads import RankThreads
from safetensors.torch import load_file, save_file
from tiny_deepseek import YARN, build, build_drafter, quantise, save

pytestmark = pytest.mark.oracle
one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)

KINDS = {
    "query rank": {},
    "no query rank, no norm of weights": {"q_lora_rank": None, "norm_topk_prob": False, "attention_bias": True},
    "yarn": {"rope_parameters": YARN, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
}


@pytest.fixture(scope="module", params=KINDS)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    reference = build(**KINDS[request.param])
    save(reference, folder)
    return load_model(folder, "float32"), reference


@pytest.fixture(params=["absorbed", "expanded"])
def way(request, monkeypatch):
    """Which of the two ways to the same numbers attention takes, single tokens aside."""
    monkeypatch.setattr(latent_cpu, "EXPANDED_TOKENS", {"absorbed": 10**9, "expanded": 2}[request.param])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("chunks", [[70], [7, 9, 16, 1, 37]], ids=str)
def test_prefill_whole_and_in_chunks(tiny, page_size, chunks):
    check_prefill(tiny, chunks, page_size)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("page_size", [8, 64])
@pytest.mark.parametrize("padding", [8, 10_000])
def test_a_mixed_batch_is_as_each_alone(tiny, page_size, padding, monkeypatch):
    monkeypatch.setattr(decode_groups, "CALL_TOKENS", padding)
    check_mixed(tiny, page_size)


def test_greedy_tokens(tiny):
    check_greedy(tiny, [tokens_of(count, seed=count) for count in (1, 16, 30)], answer=12)


def test_a_prompt_long_enough_to_be_expanded_by_itself(tiny):
    model, reference = tiny
    tokens = tokens_of(2 * latent_cpu.EXPANDED_TOKENS + 8)
    runner = Runner(model, pages=30)
    sequence = runner.sequence(tokens)
    expected = reference_logits(reference, tokens)
    for count in (latent_cpu.EXPANDED_TOKENS, 8, latent_cpu.EXPANDED_TOKENS):
        close(runner.step(sequence.next(count))[0], expected[sequence.done - 1])


def test_bfloat16_is_close(tmp_path):
    """Without experts, among which near ties would go either way."""
    reference = build(first_k_dense_replace=3)
    save(reference, tmp_path)
    tokens = tokens_of(2 * latent_cpu.EXPANDED_TOKENS)
    expected = reference_logits(reference, tokens)
    runner = Runner(load_model(tmp_path, "bfloat16"), pages=30)
    sequence = runner.sequence(tokens)
    for count in (100, latent_cpu.EXPANDED_TOKENS, 9, 1, 1):
        ours = runner.step(sequence.next(count))[0]
        wanted = expected[sequence.done - 1]
        assert (ours - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_interleave": False},
        {"tie_word_embeddings": True},
        {"n_group": 1, "topk_group": 1},
        {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 2},
        {"num_experts_per_tok": 8, "topk_group": 4},
        {"first_k_dense_replace": 3},
        {"first_k_dense_replace": 0},
        {"v_head_dim": 32},
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        {"rope_parameters": YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}},
        {"rope_parameters": YARN | {"factor": 1.0}},
        {"rope_parameters": YARN | {"attention_factor": 0.8, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5}},
    ],
    ids=str,
)
def test_variants(tmp_path, fields):
    reference = build(**fields)
    save(reference, tmp_path)
    check_last(load_model(tmp_path, "float32"), reference, 60)


def test_experts_stored_in_one_tensor_load_as_separate_ones(tmp_path):
    reference = build()
    save(reference, tmp_path / "separate")
    save(reference, tmp_path / "fused", save_original_format=False)
    ours, theirs = (load_model(tmp_path / kind, "float32").parameters.targets for kind in ("separate", "fused"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("ranks", "query_rank"), [(2, 20), (4, None)])
def test_ranks_together_are_the_whole_model(tmp_path, ranks, query_rank):
    """Heads and experts are split, latents are not: every rank's cache holds the same."""
    reference = build(q_lora_rank=query_rank, num_mtp_layers=1)
    save(reference, tmp_path, build_drafter(reference))
    tokens, other = tokens_of(60), tokens_of(25, seed=1)
    expected, of_other = reference_logits(reference, tokens), reference_logits(reference, other)
    together = RankThreads(tmp_path, ranks, page_size=8, pages=14)
    try:
        sequence, second = together.sequence(tokens), together.sequence(other)
        close(together.step(sequence.next(37))[0], expected[36])
        close(together.step(sequence.next(22), second.next(24)), torch.stack((expected[58], of_other[23])))
        close(together.step(sequence.next(1), second.next(1)), torch.stack((expected[59], of_other[24])))
        first, *others = [runner.pool.tensor[:3, sequence.pages] for runner in together.runners]
        for pool in others:
            close(pool, first)
    finally:
        together.close()


# --- weights in 8 bits ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder in full precision, and its copy in 8 bits with what that is worth."""
    folder = tmp_path_factory.mktemp("stored")
    reference = build(num_mtp_layers=1)
    save(reference, folder / "whole", build_drafter(reference))
    worth = quantise(folder / "whole", folder / "fp8", block=(16, 8))
    return folder / "fp8", worth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_8_bits_are_read_as_what_they_are_worth(stored, dtype):
    folder, worth = stored
    targets = load_model(folder, dtype).parameters.targets
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in targets
    for name, target in targets.items():
        assert torch.equal(target, worth[name].to(target.dtype)), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_weights_in_8_bits(stored, rank):
    """A block of 16 rows by 8 columns is cut: heads have 20, 22 and 10 elements, experts 24."""
    folder, worth = stored
    parameters = load_model(folder, "float32", shard=Shard(rank, 2)).parameters
    for name, part in parameters.slices.items():
        assert torch.equal(parameters.targets[name], worth[name][part.index]), name
    assert "model.layers.1.self_attn.kv_b_proj.weight" in parameters.slices


def test_blocks_larger_than_the_weights(tmp_path):
    save(build(), tmp_path / "whole")
    worth = quantise(tmp_path / "whole", tmp_path / "fp8")
    for name, target in load_model(tmp_path / "fp8", "float32").parameters.targets.items():
        assert torch.equal(target, worth[name]), name


WEIGHT = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "config", "what"),
    [
        (
            lambda w: w.pop(f"{WEIGHT}_scale_inv"),
            {},
            r"o_proj.weight is stored in 8 bits, and there is no .*_scale_inv",
        ),
        (
            lambda w: w.update({f"{WEIGHT}_scale_inv": torch.ones(3, 5)}),
            {},
            r"has shape \[3, 5\], .* asks for \[4, 5\]",
        ),
        (lambda w: w.update({"model.norm.weight_scale_inv": torch.ones(1)}), {}, r"unexpected model.norm.weight_scale"),
        (lambda w: w.pop(WEIGHT), {}, r"lacks .*o_proj.weight; it has unexpected .*o_proj.weight_scale_inv"),
        (lambda _: 0, {"quantization_config": None}, "stored in 8 bits, and config.json has no quantization_config"),
        (lambda _: 0, {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not supported"),
    ],
    ids=["no scale", "misshapen scale", "a scale for nothing", "no weight", "not declared", "another method"],
)
def test_weights_in_8_bits_that_do_not_fit_are_named(stored, tmp_path, change, config, what):
    folder, _ = stored
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | config))
    with pytest.raises(ModelError, match=what):
        load_model(tmp_path, "float32")
