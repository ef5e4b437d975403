"""A model folder's configuration, read from Hugging Face's config.json in its old and its new spelling."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry_engine.errors import ModelError
from kvferry_engine.identity import weights_identity

DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for kind `llama3`, the stretch of its long wavelengths."""

    theta: float = DEFAULT_ROPE_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    """Context length of the pre-training that the stretch starts from, in tokens."""


@dataclass(frozen=True)
class ModelConfig:
    """What a model is, apart from its weights; every size counts elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    """Longest sequence, prompt and answer together, in tokens."""
    tie_word_embeddings: bool
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
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
            _read_json(folder / "config.json"), _read_json(folder / "generation_config.json", {}), folder=folder
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

    def fingerprint(self) -> str:
        """Hash of this configuration and of the weight files' identity: equal on two nodes only for one model.

        Reads the safetensors headers and a few blocks of each file, never whole files; raises ModelError.
        """
        if self.folder is None:
            msg = "a model configuration without a folder has no weights to take a fingerprint of"
            raise ModelError(msg)
        described = {name: value for name, value in asdict(self).items() if name != "folder"}
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        digest.update(weights_identity(self.folder).encode())
        return digest.hexdigest()[:16]


def _read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
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


def _fields(raw: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
    heads = int(raw["num_attention_heads"])
    max_positions = int(raw["max_position_embeddings"])
    tokens = {**raw, **{name: value for name, value in generation.items() if value is not None}}
    return {
        "architecture": _architecture(raw),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "layers": int(raw["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": int(_first(raw, "num_key_value_heads", default=heads)),
        "head_dim": int(_first(raw, "head_dim", default=int(raw["hidden_size"]) // max(1, heads))),
        "intermediate_size": int(raw["intermediate_size"]),
        "rms_norm_eps": float(_first(raw, "rms_norm_eps", default=1e-6)),
        "rope": _rope(raw, max_positions),
        "max_positions": max_positions,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "hidden_act": str(raw.get("hidden_act", "silu")),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "dtype": str(_first(raw, "dtype", "torch_dtype", default="float32")).removeprefix("torch."),
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


def _first(raw: dict[str, Any], *names: str, default: object) -> Any:  # noqa: ANN401 - JSON values
    """Value of the first of `names` that is present and not null."""
    return next((raw[name] for name in names if raw.get(name) is not None), default)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(int(token) for token in value)
    return (int(str(value)),)


def _rope(raw: dict[str, Any], max_positions: int) -> RopeConfig:
    """Rope of either spelling: rope_parameters, or rope_theta beside rope_scaling."""
    rope: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = str(_first(rope, "rope_type", "type", default="default"))
    theta = float(_first({**raw, **rope}, "rope_theta", default=DEFAULT_ROPE_THETA))
    if float(_first({**raw, **rope}, "partial_rotary_factor", default=1.0)) != 1.0:
        msg = "partial_rotary_factor other than 1 is not supported"
        raise ValueError(msg)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        msg = f"rope type {kind!r} is not supported; supported are default, llama3"
        raise ValueError(msg)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(_first(rope, "original_max_position_embeddings", default=max_positions)),
    )
