"""A model folder's configuration, read from Hugging Face's config.json in its old and its new spelling."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry_engine.errors import ModelError
from kvferry_engine.identity import weights_identity

DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128}
"""Where the absent head_dim is not the hidden size over the heads."""


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
class ExpertsConfig:
    """A mixture of experts in place of the MLP."""

    count: int
    per_token: int
    """Experts that each token passes."""
    intermediate_size: int
    """Of one expert."""
    normalise: bool = False
    """Whether the weights of a token's experts are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that keep the plain MLP."""

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            msg = f"moe_intermediate_size must be at least 1, got {self.intermediate_size}"
            raise ValueError(msg)
        if not 1 <= self.per_token <= self.count:
            msg = f"num_experts_per_tok is {self.per_token}, of {self.count} experts"
            raise ValueError(msg)


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
    experts: ExpertsConfig | None = None
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
    _refuse_windows(raw)
    heads = int(raw["num_attention_heads"])
    head_dim = DEFAULT_HEAD_DIM.get(_architecture(raw), int(raw["hidden_size"]) // max(1, heads))
    max_positions = int(raw["max_position_embeddings"])
    tokens = {**raw, **{name: value for name, value in generation.items() if value is not None}}
    return {
        "architecture": _architecture(raw),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "layers": int(raw["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": int(_first(raw, "num_key_value_heads", default=heads)),
        "head_dim": int(_first(raw, "head_dim", default=head_dim)),
        "intermediate_size": int(raw["intermediate_size"]),
        "rms_norm_eps": float(_first(raw, "rms_norm_eps", default=1e-6)),
        "rope": _rope(raw, max_positions),
        "max_positions": max_positions,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "hidden_act": str(raw.get("hidden_act", "silu")),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "experts": _experts(raw),
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


def _refuse_windows(raw: dict[str, Any]) -> None:
    windows = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    if windows or set(raw.get("layer_types") or ()) - {"full_attention"}:
        msg = "attention other than full is not supported, but use_sliding_window or layer_types asks for it"
        raise ValueError(msg)


def _experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Experts of either spelling of their number; None where every layer is dense."""
    count = int(_first(raw, "num_experts", "num_local_experts", default=0))
    if not count:
        return None
    every = int(_first(raw, "decoder_sparse_step", default=1))
    if every < 1:
        msg = f"decoder_sparse_step must be at least 1, got {every}"
        raise ValueError(msg)
    dense = {int(layer) for layer in _first(raw, "mlp_only_layers", default=())}
    return ExpertsConfig(
        count=count,
        per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        normalise=bool(raw.get("norm_topk_prob", False)),
        dense_layers=tuple(
            layer for layer in range(int(raw["num_hidden_layers"])) if layer in dense or (layer + 1) % every
        ),
    )


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
