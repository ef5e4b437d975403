import json
import math

import pytest
import torch
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError, UnknownArchitecture
from kvferry_engine.experts_config import ExpertsConfig
from kvferry_engine.kv_size import kv_layout
from kvferry_engine.latent_config import LatentConfig
from kvferry_engine.rope_config import RopeConfig
from safetensors.torch import save_file

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "q_lora_rank": None}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def folder_of(path, weights=None, generation=None, **fields):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**BASE, **fields}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if weights is not None:
        save_file(weights, path / "model.safetensors")
    return path


def test_old_and_new_spelling_mean_the_same():
    old = ModelConfig.from_dict(
        {**BASE, "torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **STRETCH}}
    )
    new = ModelConfig.from_dict(
        {**BASE, "dtype": "bfloat16", "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **STRETCH}}
    )
    oldest = ModelConfig.from_dict(
        {**BASE, "torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **STRETCH}}
    )
    assert old == new == oldest
    assert new.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32)
    assert new.dtype == "bfloat16"


def test_yarn_of_any_spelling():
    """Its fields as DeepSeek's own folders have them, as transformers writes them now, and what follows from others."""
    yarn = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1}
    length = {"original_max_position_embeddings": 32}
    old = ModelConfig.from_dict({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **yarn, **length}})
    new = ModelConfig.from_dict(
        {**BASE, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **yarn, **length, "factor": None}}
    )
    assert old == new
    sharper = {weight: 0.1 * weight * math.log(4) + 1 for weight in (0.5, 1.0)}
    rope = new.rope
    assert (rope.kind, rope.factor, rope.fast_turns, rope.slow_turns, rope.original_max_positions) == (
        "yarn", 4.0, 32.0, 1.0, 32
    )  # fmt: skip
    assert rope.magnitude == pytest.approx(sharper[1.0] / sharper[0.5])
    assert rope.score_magnitude == pytest.approx(sharper[0.5] ** 2)
    plain = ModelConfig.from_dict({**BASE, "rope_scaling": {"type": "yarn", "factor": 4.0, **length}}).rope
    assert (plain.magnitude, plain.score_magnitude) == (pytest.approx(sharper[1.0]), 1.0)


def test_latents_are_one_kv_head():
    config = ModelConfig.from_dict({**BASE, **LATENT, "head_dim": 8})
    assert (config.kv_heads, config.head_dim, config.rope_dim) == (1, 24, 8)
    assert config.latent == LatentConfig(rank=16, rope_dim=8, nope_dim=12, value_dim=10)
    assert ModelConfig.from_dict({**BASE, **LATENT, "q_lora_rank": 6}).latent.query_rank == 6
    assert ModelConfig.from_dict(BASE).latent is None


R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip


def test_the_folder_that_deepseek_r1_is_published_in(tmp_path):
    folder = folder_of(tmp_path / "r1", weights={"w": torch.zeros(1)}, **R1)
    config = ModelConfig.from_folder(folder)
    assert config.experts == ExpertsConfig(
        256, 8, 2048, True, (0, 1, 2), groups=8, top_groups=4, scale=2.5, shared_size=2048
    )
    assert (config.weight_blocks, config.draft_layers, config.rope.magnitude) == ((128, 128), 1, 1.0)
    assert config.rope.score_magnitude == pytest.approx(1.8738, abs=1e-4)
    layout = kv_layout(config, dtype="bfloat16", page_size=16, ranks=8)
    assert (layout.layers, layout.page_bytes, layout.replicas) == (62, 16 * 1152, 8)
    assert layout.token_bytes == 62 * 1152


def test_experts_in_groups_beside_shared_ones():
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
    fields = {**EXPERTS, **groups, "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    fields["n_routed_experts"] = fields.pop("num_experts")
    assert ModelConfig.from_dict({**BASE, **fields}).experts == ExpertsConfig(
        8, 2, 16, dense_layers=(0,), groups=4, top_groups=2, scale=2.5, shared_size=32
    )


def test_a_drafting_layer_does_not_make_another_model(tmp_path):
    """Nodes that do and don't keep it are told apart by their layouts' layers."""
    weights = {"w": torch.zeros(3)}
    without, counted = (
        ModelConfig.from_folder(folder_of(tmp_path / str(count), weights=weights, num_nextn_predict_layers=count))
        for count in (0, 1)
    )
    assert (without.draft_layers, counted.draft_layers) == (0, 1)
    assert without.fingerprint() == counted.fingerprint()


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_plain_rope(rope):
    assert ModelConfig.from_dict({**BASE, **rope}).rope == RopeConfig(theta=10_000.0)


def test_absent_fields_follow_from_others():
    raw = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    config = ModelConfig.from_dict({**raw, "head_dim": None})
    assert (config.kv_heads, config.head_dim, config.tie_word_embeddings) == (4, 8, False)


def test_a_window_that_is_switched_off_is_none():
    fields = {"use_sliding_window": False, "sliding_window": 64, "layer_types": ["full_attention"] * 2}
    assert ModelConfig.from_dict({**BASE, **fields}) == ModelConfig.from_dict(BASE)


@pytest.mark.parametrize(("architecture", "head_dim"), [("Qwen3ForCausalLM", 128), ("Qwen3MoeForCausalLM", 8)])
def test_an_absent_head_dim_is_the_architectures(architecture, head_dim):
    assert ModelConfig.from_dict({**BASE, "architectures": [architecture]}).head_dim == head_dim


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, ()),
        ({"mlp_only_layers": [3]}, (3,)),
        ({"decoder_sparse_step": 3}, (0, 1, 3)),
        ({"mlp_only_layers": [2], "decoder_sparse_step": 3}, (0, 1, 2, 3)),
    ],
    ids=str,
)
def test_experts_of_either_spelling(name, fields, dense):
    raw = {**BASE, **EXPERTS, "norm_topk_prob": True, "num_hidden_layers": 4, **fields}
    raw[name] = raw.pop("num_experts")
    assert ModelConfig.from_dict(raw).experts == ExpertsConfig(8, 2, 16, normalise=True, dense_layers=dense)


@pytest.mark.parametrize("fields", [{}, {**EXPERTS, "num_experts": 0}])
def test_a_model_without_experts_has_none(fields):
    assert ModelConfig.from_dict({**BASE, **fields}).experts is None


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), ([2, 7], (2, 7))])
def test_stop_tokens(value, ids):
    assert ModelConfig.from_dict({**BASE, "eos_token_id": value}).eos_token_ids == ids


def test_the_generation_config_has_the_last_word(tmp_path):
    folder = folder_of(
        tmp_path / "m", generation={"eos_token_id": [5, 6], "bos_token_id": None}, eos_token_id=2, bos_token_id=1
    )
    config = ModelConfig.from_folder(folder)
    assert (config.eos_token_ids, config.bos_token_id) == ((5, 6), 1)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide over 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": []}, "architectures"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({**EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 8 experts"),
        ({**EXPERTS, "num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({**EXPERTS, "moe_intermediate_size": 0}, "moe_intermediate_size must be at least 1"),
        ({**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ({**EXPERTS, "n_group": 3}, "8 experts cannot be in 3 groups"),
        ({**EXPERTS, "n_group": 8, "topk_group": 4}, "8 experts cannot be in 8 groups of equally many, two or more"),
        ({**EXPERTS, "n_group": 4, "topk_group": 5}, "topk_group is 5, of 4 groups"),
        ({**EXPERTS, "n_group": 4, "num_experts_per_tok": 3}, "3 experts per token are more than 1 of 4 groups hold"),
        ({**EXPERTS, "scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({**EXPERTS, "topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported is noaux_tc"),
        ({**EXPERTS, "moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({**LATENT, "qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({**LATENT, "v_head_dim": 0}, "value_dim must be at least 1"),
        ({"kv_lora_rank": 16}, "'qk_rope_head_dim' is missing"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported; supported is fp8"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt 'e5m2' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'weight_block_size' is missing"),
        ({"quantization_config": {"weight_block_size": [128, 0]}}, "weight_block_size .*128, 0.* at least 1 by 1"),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "'moe_intermediate_size' is missing"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"hidden_size": "many"}, "many"),
    ],
)
def test_a_configuration_that_cannot_be_served_says_why(tmp_path, fields, what):
    folder = folder_of(tmp_path / "m", **fields)
    with pytest.raises(ModelError, match=what) as caught:
        ModelConfig.from_folder(folder)
    assert str(folder) in str(caught.value)


def test_another_architecture_is_named_before_what_its_configuration_lacks():
    with pytest.raises(UnknownArchitecture, match=r"'GPT2LMHeadModel' is not known; known are .*Qwen3ForCausalLM"):
        ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"], "n_head": 12})


def test_a_missing_field_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelError, match="'num_attention_heads' is missing"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_what_is_not_a_model_folder_is_refused(tmp_path, content):
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def fingerprint(path, seed=0, **fields):
    weights = {"a": torch.randn(40, 40, generator=torch.Generator().manual_seed(seed))}
    return ModelConfig.from_folder(folder_of(path, weights, **fields)).fingerprint()


def test_the_fingerprint_is_the_models_not_the_folders(tmp_path):
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


def test_the_fingerprint_tells_configurations_and_weights_of_one_shape_apart(tmp_path):
    prints = [
        fingerprint(tmp_path / "a"),
        fingerprint(tmp_path / "b", rms_norm_eps=1e-6),
        fingerprint(tmp_path / "c", seed=1),
        fingerprint(tmp_path / "d", **EXPERTS),
        fingerprint(tmp_path / "e", **EXPERTS, norm_topk_prob=True),
    ]
    assert len(set(prints)) == 5


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64])
def test_weights_that_are_no_safetensors_have_no_fingerprint(tmp_path, content):
    folder = folder_of(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cut short"):
        ModelConfig.from_folder(folder).fingerprint()


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, "outside its folder"),
        ({"weight_map": {"a": "model-1.safetensors"}}, "lacks model-1.safetensors"),
        ({}, "not a safetensors index"),
    ],
)
def test_an_index_names_files_of_its_folder(tmp_path, index, what):
    folder = folder_of(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=what):
        ModelConfig.from_folder(folder).fingerprint()
