"""A model folder's configuration, read from Hugging Face's config.json in its old and its new spelling."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry_engine.config_fields import first, only
from kvferry_engine.errors import ModelError, UnknownArchitecture
from kvferry_engine.experts_config import ExpertsConfig, read_experts
from kvferry_engine.identity import weights_identity
from kvferry_engine.latent_config import LatentConfig, read_latent
from kvferry_engine.rope_config import RopeConfig, read_rope

ARCHITECTURES = ("DeepseekV3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Those that `kvferry_engine.models` has classes for; here, since those take torch."""

DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128}
"""Where the absent head_dim is not the hidden size over the heads."""


@dataclass(frozen=True)
class ModelConfig:
    """What a model is, apart from its weights; every size counts elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    """Of latent attention 1: the latent, which serves all heads as key and value."""
    head_dim: int
    """Elements that a KV head keeps of a token as its key; of latent attention the latent's and the turned key's."""
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    """Longest sequence, prompt and answer together, in tokens."""
    tie_word_embeddings: bool
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    """Set where attention keeps latents instead of keys and values."""
    draft_layers: int = 0
    """Layers after the last that predict the token after the next (MTP), if the weights have them."""
    weight_blocks: tuple[int, int] | None = None
    """Rows and columns of a weight that share a scale, where weights are stored quantised."""
    dtype: str = "float32"
    """Dtype of the stored weights."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json and, where present, generation_config.json of `folder`; raises ModelError."""
        folder = Path(folder)
        return cls.from_dict(
            read_json(folder / "config.json"), read_json(folder / "generation_config.json", {}), folder=folder
        )

    @classmethod
    def from_dict(
        cls, raw: dict[str, Any], generation: dict[str, Any] | None = None, *, folder: Path | None = None
    ) -> "ModelConfig":
        """Build from the contents of config.json and generation_config.json; raises ModelError naming the field."""
        try:
            config = cls(**_fields(raw, generation or {}), folder=folder)
        except (KeyError, TypeError, ValueError) as error:
            where = folder / "config.json" if folder else "model configuration"
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            msg = f"{where}: {what}"
            raise ModelError(msg) from error
        return config

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                msg = f"{name} must be at least 1, got {getattr(self, name)}"
                raise ValueError(msg)
        if self.heads % self.kv_heads:
            msg = f"{self.heads} attention heads do not divide over {self.kv_heads} KV heads"
            raise ValueError(msg)

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are turned by the position."""
        return self.latent.rope_dim if self.latent else self.head_dim

    def fingerprint(self) -> str:
        """Hash of this configuration and of the weight files' identity: equal on two nodes only for one model.

        Reads the safetensors headers and a few blocks of each file, never whole files; raises ModelError.
        """
        if self.folder is None:
            msg = "a model configuration without a folder has no weights to take a fingerprint of"
            raise ModelError(msg)
        # Whether a node keeps the drafting layers is told by the number of layers in its KV layout.
        described = {name: value for name, value in asdict(self).items() if name not in ("folder", "draft_layers")}
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        digest.update(weights_identity(self.folder).encode())
        return digest.hexdigest()[:16]


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the object in a model folder's file, or `default` if there is no such file. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if default is not None:
            return default
        msg = f"{path.parent} is not a model folder: it has no {path.name}"
        raise ModelError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ModelError(msg) from error
    if not isinstance(content, dict):
        msg = f"{path} is not a JSON object"
        raise ModelError(msg)
    return content


def unknown_architecture(name: str) -> UnknownArchitecture | None:
    """Return what is to be raised for an architecture that no model here has."""
    return None if name in ARCHITECTURES else UnknownArchitecture(name, list(ARCHITECTURES))


def _fields(raw: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
    # First of all: others call their fields by other names.
    if unknown := unknown_architecture(_architecture(raw)):
        raise unknown
    _refuse_windows(raw)
    heads = int(raw["num_attention_heads"])
    latent = read_latent(raw)
    head_dim = DEFAULT_HEAD_DIM.get(_architecture(raw), int(raw["hidden_size"]) // max(1, heads))
    max_positions = int(raw["max_position_embeddings"])
    tokens = {**raw, **{name: value for name, value in generation.items() if value is not None}}
    return {
        "architecture": _architecture(raw),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "layers": int(raw["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": 1 if latent else int(first(raw, "num_key_value_heads", default=heads)),
        "head_dim": latent.kept_dim if latent else int(first(raw, "head_dim", default=head_dim)),
        "intermediate_size": int(raw["intermediate_size"]),
        "rms_norm_eps": float(first(raw, "rms_norm_eps", default=1e-6)),
        "rope": read_rope(raw, max_positions),
        "max_positions": max_positions,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "hidden_act": str(raw.get("hidden_act", "silu")),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "experts": read_experts(raw),
        "latent": latent,
        "draft_layers": _draft_layers(raw),
        "weight_blocks": _weight_blocks(raw),
        "dtype": str(first(raw, "dtype", "torch_dtype", default="float32")).removeprefix("torch."),
        "bos_token_id": _token_ids(tokens.get("bos_token_id"))[0] if _token_ids(tokens.get("bos_token_id")) else None,
        "eos_token_ids": _token_ids(tokens.get("eos_token_id")),
        "pad_token_id": _token_ids(tokens.get("pad_token_id"))[0] if _token_ids(tokens.get("pad_token_id")) else None,
    }


def _architecture(raw: dict[str, Any]) -> str:
    names = raw["architectures"]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        msg = f"architectures is {names!r}, not a list of names"
        raise ValueError(msg)
    return names[0]


def _refuse_windows(raw: dict[str, Any]) -> None:
    windows = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    if windows or set(raw.get("layer_types") or ()) - {"full_attention"}:
        msg = "attention other than full is not supported, but use_sliding_window or layer_types asks for it"
        raise ValueError(msg)


def _weight_blocks(raw: dict[str, Any]) -> tuple[int, int] | None:
    """Blocks of quantised weights, (rows, columns); None where weights are stored as they are computed with."""
    quantised = raw.get("quantization_config")
    if quantised is None:
        return None
    only(quantised, "quant_method", "fp8")
    only(quantised, "fmt", "e4m3")
    rows, columns = quantised["weight_block_size"]
    if min(rows, columns) < 1:
        msg = f"weight_block_size {[rows, columns]} must be at least 1 by 1"
        raise ValueError(msg)
    return int(rows), int(columns)


def _draft_layers(raw: dict[str, Any]) -> int:
    count = int(first(raw, "num_nextn_predict_layers", "num_mtp_layers", default=0))
    if count not in (0, 1):
        msg = f"num_nextn_predict_layers {count} is not supported; supported are 0, 1"
        raise ValueError(msg)
    return count


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(int(token) for token in value)
    return (int(str(value)),)
