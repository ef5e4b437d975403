"""A GGUF file of the Llama family, dequantised into a Hugging Face style model folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from kvferry_engine.dtypes import TORCH_DTYPES
from kvferry_engine.errors import ModelError
from kvferry_engine.gguf_tokenizer import write_tokenizer

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Fields:
    """The metadata of a GGUF file; asking for a key that is absent raises ModelError naming it."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - GGUF values are of any type
        if key not in self._fields:
            msg = f"{self._path} has no {key}"
            raise ModelError(msg)
        return self._fields[key].contents()

    def get(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - GGUF values are of any type
        """Value of `key`, or `default` where it is absent."""
        return self._fields[key].contents() if key in self._fields else default


def convert(
    path: Path, folder: Path, *, dtype: str = "bfloat16", progress: Callable[[int, int], None] | None = None
) -> None:
    """Write config, weights and tokenizer of the GGUF file `path` into `folder`; raises ModelError.

    `progress` is called with (bytes of weights converted, bytes in all), counted in the GGUF.
    """
    reader = gguf.GGUFReader(path)
    fields = Fields(path, reader.fields)
    if fields["general.architecture"] != "llama":
        msg = f"{path} holds {fields['general.architecture']!r}; only llama can be converted"
        raise ModelError(msg)
    weights = _weights(reader, fields, TORCH_DTYPES[dtype], progress)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(fields, dtype, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    write_tokenizer(fields, folder)


def _weights(
    reader: gguf.GGUFReader, fields: Fields, dtype: torch.dtype, progress: Callable[[int, int], None] | None
) -> dict[str, torch.Tensor]:
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields.get("llama.attention.head_count_kv", fields["llama.attention.head_count"])),
    }
    total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    done, weights = 0, {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name, part = _name(tensor.name)
        if part in heads:
            values = unpermute(values, heads[part])
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)
        done += int(tensor.n_bytes)
        if progress:
            progress(done, total)
    return weights


def _name(name: str) -> tuple[str, str]:
    """Hugging Face's name of a GGUF tensor, and the part of the model that it is; raises ModelError."""
    pieces = name.split(".")
    layer, part = (pieces[1], pieces[2]) if pieces[0] == "blk" and len(pieces) == 4 else (None, pieces[0])
    if part not in NAMES:
        msg = f"GGUF tensor {name} is not part of a Llama model"
        raise ModelError(msg)
    prefix = f"model.layers.{layer}." if layer is not None else ""
    return f"{prefix}{NAMES[part]}.{pieces[-1]}", part


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of a head's rows, [heads * D, inputs].

    GGUF interleaves the two dimensions that rope turns together; Hugging Face keeps them D / 2 apart.
    """
    rows, inputs = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def _config(fields: Fields, dtype: str, *, tied: bool) -> dict[str, Any]:
    heads, hidden = int(fields["llama.attention.head_count"]), int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(fields["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        # GGUF stores 32-bit floats: 1e-05 would come out as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10_000.0)),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **_special_ids(fields),
    }


def _generation_config(fields: Fields) -> dict[str, Any]:
    return _special_ids(fields)


def _special_ids(fields: Fields) -> dict[str, Any]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: fields.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
