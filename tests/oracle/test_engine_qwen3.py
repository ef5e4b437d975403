"""Qwen3 and Qwen3-MoE over the paged cache against transformers on the same folder, in float32."""

import json
import random

import pytest
import torch
from engine_runner import VOCABULARY, Runner, close, reference_logits, tokens_of
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError
from kvferry_engine.weights import load_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.oracle

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CLASSES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_tiny(kind, kv_heads=2, **fields):
    """A random model no part of which can be left out unseen: norms and biases are neither 0 nor 1."""
    torch.manual_seed(0)
    config_class, model_class = CLASSES[kind]
    config = config_class(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "head_dim": 24,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            **(EXPERTS if kind == "moe" else {}),
            **fields,
        }
    )
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            parameter.data.normal_(mean=float(name.endswith("weight")), std=0.3)
        elif name.endswith("mlp.gate.weight"):
            parameter.data.normal_(std=0.5)
    return model


@pytest.fixture(scope="module", params=[(kind, kv) for kind in CLASSES for kv in (1, 2, 4)], ids=str)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    reference = build_tiny(*request.param)
    reference.save_pretrained(folder)
    return load_model(folder, "float32"), reference


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("chunks", [[70], [7, 9, 16, 1, 37]], ids=str)
def test_prefill_whole_and_in_chunks(tiny, page_size, chunks):
    model, reference = tiny
    tokens = tokens_of(70)
    expected = reference_logits(reference, tokens)
    runner = Runner(model, page_size=page_size, pages=12)
    sequence = runner.sequence(tokens)
    for count in chunks:
        close(runner.step(sequence.next(count))[0], expected[sequence.done - 1])


@pytest.mark.parametrize("page_size", [8, 16])
def test_a_mixed_batch_is_as_each_alone(tiny, page_size):
    """Random chunks of random sequences together, some of them single tokens; every row is checked."""
    model, reference = tiny
    dice = random.Random(page_size)
    runner = Runner(model, page_size=page_size, pages=40)
    sequences = [runner.sequence(tokens_of(dice.randrange(15, 50), seed=index)) for index in range(4)]
    expected = [reference_logits(reference, sequence.tokens) for sequence in sequences]
    while any(sequence.done < len(sequence.tokens) for sequence in sequences):
        running = [index for index, s in enumerate(sequences) if s.done < len(s.tokens)]
        slices = []
        for index in running:
            left = len(sequences[index].tokens) - sequences[index].done
            slices.append(sequences[index].next(1 if dice.random() < 0.3 else dice.randint(1, left)))
        logits = runner.step(*slices)
        for row, index in enumerate(running):
            close(logits[row], expected[index][sequences[index].done - 1])


def test_greedy_tokens(tiny):
    model, reference = tiny
    prompts = [tokens_of(count, seed=count) for count in (1, 16, 30)]
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
        for prompt in prompts
    ]
    runner = Runner(model)
    sequences = [runner.sequence(prompt, room=12) for prompt in prompts]
    logits = runner.step(*(sequence.next(len(sequence.tokens)) for sequence in sequences))
    for _ in range(12):
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
        logits = runner.step(*(sequence.next(1) for sequence in sequences))
    assert [sequence.tokens for sequence in sequences] == expected


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 64}),
        ("qwen3", {"rope_parameters": YARN}),
        ("moe", {"attention_bias": True}),
        ("moe", {"norm_topk_prob": False}),
        ("moe", {"num_experts_per_tok": 1}),
        ("moe", {"num_experts_per_tok": 6}),
        ("moe", {"decoder_sparse_step": 2}),
        ("moe", {"mlp_only_layers": [0, 2]}),
        ("moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
        ("moe", {"num_experts": 0}),
    ],
    ids=str,
)
def test_variants(tmp_path, kind, fields):
    reference = build_tiny(kind, **fields)
    reference.save_pretrained(tmp_path)
    runner = Runner(load_model(tmp_path, "float32"))
    tokens = tokens_of(40)
    close(runner.step(runner.sequence(tokens).next(40))[0], reference_logits(reference, tokens)[-1])


def test_which_layers_have_experts(tmp_path):
    build_tiny("moe", mlp_only_layers=[1], decoder_sparse_step=2, num_hidden_layers=6).save_pretrained(tmp_path)
    assert ModelConfig.from_folder(tmp_path).experts.dense_layers == (0, 1, 2, 4)


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """A folder with a tensor for each expert's projection."""
    folder = tmp_path_factory.mktemp("separate")
    build_tiny("moe", mlp_only_layers=[1]).save_pretrained(folder)
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in load_file(folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_experts_stored_in_one_tensor_load_as_separate_ones(tmp_path, separate, shard):
    build_tiny("moe", mlp_only_layers=[1]).save_pretrained(tmp_path, save_original_format=False, max_shard_size=shard)
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
