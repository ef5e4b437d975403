"""Qwen3 and Qwen3-MoE over the paged cache against transformers on the same folder, in float32."""

import json

import pytest
import torch
from decode_rig import one_thread
from engine_runner import tokens_of
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError
from kvferry_engine.weights import load_model
from oracle_checks import check_greedy, check_last, check_mixed, check_prefill
from random_models import build_random
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.oracle
one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module", params=[(kind, kv) for kind in ("qwen3", "qwen3_moe") for kv in (1, 2, 4)], ids=str)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    kind, kv_heads = request.param
    reference = build_random(folder, kind, kv_heads=kv_heads)
    return load_model(folder, "float32"), reference


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("chunks", [[70], [7, 9, 16, 1, 37]], ids=str)
def test_prefill_whole_and_in_chunks(tiny, page_size, chunks):
    check_prefill(tiny, chunks, page_size)


@pytest.mark.parametrize("page_size", [8, 16])
def test_a_mixed_batch_is_as_each_alone(tiny, page_size):
    check_mixed(tiny, page_size)


def test_greedy_tokens(tiny):
    check_greedy(tiny, [tokens_of(count, seed=count) for count in (1, 16, 30)], answer=12)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 64}),
        ("qwen3", {"rope_parameters": YARN}),
        ("qwen3_moe", {"attention_bias": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"num_experts_per_tok": 6}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
        ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
        ("qwen3_moe", {"num_experts": 0}),
    ],
    ids=str,
)
def test_variants(tmp_path, kind, fields):
    reference = build_random(tmp_path, kind, **fields)
    check_last(load_model(tmp_path, "float32"), reference, 40)


def test_which_layers_have_experts(tmp_path):
    build_random(tmp_path, "qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2, num_hidden_layers=6)
    assert ModelConfig.from_folder(tmp_path).experts.dense_layers == (0, 1, 2, 4)


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """A folder with a tensor for each expert's projection."""
    folder = tmp_path_factory.mktemp("separate")
    build_random(folder, "qwen3_moe", mlp_only_layers=[1])
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in load_file(folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_experts_stored_in_one_tensor_load_as_separate_ones(tmp_path, separate, shard):
    model = build_random(tmp_path / "other", "qwen3_moe", mlp_only_layers=[1])
    model.save_pretrained(tmp_path, save_original_format=False, max_shard_size=shard)
    names = [name for path in tmp_path.glob("*.safetensors") for name in load_file(path)]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.mlp.experts.5.up_proj.weight" not in names
    ours, theirs = load_model(tmp_path, "float32"), load_model(separate, "float32")
    assert ours.parameters.targets.keys() == theirs.parameters.targets.keys()
    for name, target in ours.parameters.targets.items():
        assert torch.equal(target, theirs.parameters.targets[name])


def copy_of(folder, target, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


EXPERT = "model.layers.2.mlp.experts"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda w: w.pop(f"{EXPERT}.3.up_proj.weight"), r"lacks model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight$"),
        (lambda w: w.update({f"{EXPERT}.6.up_proj.weight": torch.ones(2)}), r"unexpected .*experts\.6\.up_proj"),
        (lambda w: w.update({f"{EXPERT}.3.up_proj.weight": torch.ones(40, 3)}), r"3\.up_proj.* shape \[40, 3\]"),
        (lambda w: w.update({f"{EXPERT}.down_proj": torch.ones(6, 64, 40)}), r"unexpected .*experts\.\S*down_proj"),
        (lambda w: w.pop("model.layers.0.self_attn.q_norm.weight"), r"lacks .*q_norm\.weight$"),
        (lambda w: w.update({"model.layers.1.mlp.gate.weight": torch.ones(6, 64)}), r"unexpected .*1\.mlp\.gate"),
    ],
    ids=["absent", "one too many", "misshapen", "stored twice", "no head norm", "a router in a dense layer"],
)
def test_weights_that_do_not_fit_are_named(tmp_path, separate, change, what):
    with pytest.raises(ModelError, match=what):
        load_model(copy_of(separate, tmp_path, change), "float32")


def test_older_folders_mean_the_same(separate, tmp_path):
    folder = copy_of(separate, tmp_path, lambda _: None)
    raw = json.loads((folder / "config.json").read_text())
    raw["num_experts"] = raw.pop("num_local_experts")
    raw["torch_dtype"] = raw.pop("dtype")
    raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**raw, "rope_scaling": None}))
    assert ModelConfig.from_folder(folder) == ModelConfig.from_folder(separate)
    assert ModelConfig.from_folder(folder).fingerprint() == ModelConfig.from_folder(separate).fingerprint()
