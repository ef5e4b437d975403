"""Small models with random weights and SmolLM2's tokenizer: the whole way in milliseconds."""

import shutil
from pathlib import Path

import tiny_deepseek
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def make_tiny_llama(folder, tokenizer_from, *, layers=3, kv_heads=2, seed=0):
    """Write a Hugging Face style folder. Its answers are nonsense, and reproducible."""
    folder = Path(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return copy_tokenizer(folder, tokenizer_from)


def make_tiny_deepseek(folder, tokenizer_from, **fields):
    """Write a small DeepSeek-V3 with a drafting layer, whose cache holds latents."""
    shape = {
        "vocab_size": 49152,
        "num_mtp_layers": 1,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    reference = tiny_deepseek.build(tie_word_embeddings=True, **(shape | fields))
    tiny_deepseek.save(reference, folder, tiny_deepseek.build_drafter(reference))
    return copy_tokenizer(Path(folder), tokenizer_from)


def copy_tokenizer(folder, tokenizer_from):
    """Give a model folder another's tokenizer; returns the folder."""
    for name in TOKENIZER_FILES:
        source = Path(tokenizer_from) / name
        if source.exists():
            shutil.copy(source, folder / name)
    return folder
