"""Small random DeepSeek-V3 models, with a drafting layer where asked, as the reference builds them and as folders."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def build(**fields):
    """A random model no part of which can be left out unseen: norms and biases are neither 0 nor 1."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **{
            "vocab_size": 199,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            **fields,
        }
    )
    return randomise(DeepseekV3ForCausalLM(config).eval())


def randomise(model):
    """Norms, biases and routers as training would leave them."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("norm.weight", "enorm.weight", "hnorm.weight", "bias")):
            value.data.normal_(mean=float(name.endswith("weight")), std=0.3)
        elif name.endswith("gate.weight"):
            value.data.normal_(std=0.5)
    return model


def build_drafter(reference):
    """The reference's drafting layer beside `reference`, whose config counts one."""
    torch.manual_seed(1)
    drafter = randomise(MtpModel(reference, 1).eval())
    for name, value in drafter.named_parameters():
        if "layers." in name and value.dim() > 1 and "gate.weight" not in name:
            value.data.normal_(std=0.2)
    return drafter


def build_guessing(sharpness=0.1, **fields):
    """A model and a drafting layer that guesses right now and then: both go mostly by the last token alone.

    Attention and the hidden state still have their say in a guess: the less, the smaller `sharpness`.
    """
    reference = build(num_mtp_layers=1, **fields)
    drafter = build_drafter(reference)
    for name, value in [*reference.named_parameters(), *drafter.named_parameters()]:
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            value.data.mul_(sharpness)
        elif name.endswith("embed_tokens.weight"):
            value.data.mul_(5)
    layer, size = drafter.layers[0], reference.config.hidden_size
    layer.enorm.weight.data.fill_(1)
    layer.eh_proj.weight.data[:, :size] = torch.eye(size)
    layer.eh_proj.weight.data[:, size:].mul_(sharpness / 4)
    layer.post_norm.weight.data.copy_(reference.model.norm.weight.data)
    return reference, drafter


def save(reference, folder, drafter=None, **options):
    """Write the folder; a drafting layer goes where released checkpoints have it, copies of embedding and head too."""
    reference.save_pretrained(folder, **options)
    if drafter is None:
        return
    prefix = f"model.layers.{reference.config.num_hidden_layers}"
    state = {f"{prefix}.{name}": value for name, value in _released_names(drafter)}
    state[f"{prefix}.embed_tokens.weight"] = reference.model.embed_tokens.weight
    state[f"{prefix}.shared_head.head.weight"] = reference.lm_head.weight
    path = Path(folder) / "model.safetensors"
    whole = load_file(path) | {name: value.detach().clone().contiguous() for name, value in state.items()}
    save_file(whole, path, metadata={"format": "pt"})


def _released_names(drafter):
    for full, value in drafter.state_dict().items():
        if not full.startswith("layers.0."):
            continue
        name = full.removeprefix("layers.0.").removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name == "mlp.experts.gate_up_proj":
            for index, both in enumerate(value):
                gate, up = both.chunk(2)
                yield f"mlp.experts.{index}.gate_proj.weight", gate
                yield f"mlp.experts.{index}.up_proj.weight", up
        elif name == "mlp.experts.down_proj":
            for index, down in enumerate(value):
                yield f"mlp.experts.{index}.down_proj.weight", down
        else:
            yield name, value


def quantise(folder, target, block=(128, 128)):
    """Copy a folder with the weights that released checkpoints store so as FP8 with a scale per block.

    Returns what the weights are worth afterwards, by name, float32.
    """
    weights = load_file(Path(folder) / "model.safetensors")
    stored, worth = {}, {}
    for name, value in weights.items():
        plain = name.endswith(("norm.weight", "gate.weight", "bias", "eh_proj.weight")) or value.dim() != 2
        if plain or "embed_tokens" in name or "head" in name:
            stored[name] = worth[name] = value
            continue
        scale, worth[name], stored[name] = _blocks(value.float(), block)
        stored[f"{name}_scale_inv"] = scale
    target.mkdir(exist_ok=True)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((Path(folder) / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    (target / "config.json").write_text(json.dumps(raw))
    return worth


def _blocks(value, block):
    rows, columns = (-(-size // step) for size, step in zip(value.shape, block, strict=True))
    scale = torch.empty(rows, columns)
    worth, stored = torch.empty_like(value), torch.empty_like(value, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            scale[row, column] = value[place].abs().max() / 448
            stored[place] = (value[place] / scale[row, column]).to(torch.float8_e4m3fn)
            worth[place] = stored[place].float() * scale[row, column]
    return scale, worth, stored
