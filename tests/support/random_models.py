"""Small random models of every architecture, no part of which can be left out unseen."""

from pathlib import Path

import torch
from engine_runner import VOCABULARY
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
}


def build_random(folder, kind, *, kv_heads=2, save_original_format=True, **fields):
    """Save a model to `folder` and return it. Norms and biases are neither 0 nor 1; answers are reproducible."""
    torch.manual_seed(0)
    config_class, model_class, own = CLASSES[kind]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    model = model_class(config_class(**(shape | own | fields))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            parameter.data.normal_(mean=float(name.endswith("weight")), std=0.3)
        elif name.endswith("mlp.gate.weight"):
            parameter.data.normal_(std=0.5)
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, save_original_format=save_original_format)
    return model
