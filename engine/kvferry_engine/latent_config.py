"""The sizes of latent attention (MLA)."""

from dataclasses import dataclass
from typing import Any

from kvferry_engine.config_fields import first


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention: what a token keeps is one vector, of which every head makes its key and its value."""

    rank: int
    """Elements of the latent, without the part of the key that is turned by the position."""
    rope_dim: int
    """Elements of the turned part, of a query head and of the one key that all heads share."""
    nope_dim: int
    """Elements of a query or key head that don't depend on the position."""
    value_dim: int
    """Elements of a value head."""
    query_rank: int | None = None
    """Elements of the vector that all query heads are made from; None where they come from the hidden state."""
    interleaved: bool = True
    """Whether dimension 2 i is paired with 2 i + 1 when they are turned, instead of i with i + rope_dim / 2."""

    def __post_init__(self) -> None:
        for name in ("rank", "rope_dim", "nope_dim", "value_dim"):
            if getattr(self, name) < 1:
                msg = f"latent attention: {name} must be at least 1, got {getattr(self, name)}"
                raise ValueError(msg)
        if self.rope_dim % 2:
            msg = f"qk_rope_head_dim {self.rope_dim} is odd"
            raise ValueError(msg)

    @property
    def kept_dim(self) -> int:
        """Elements that a token keeps in a layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.nope_dim + self.rope_dim


def read_latent(raw: dict[str, Any]) -> LatentConfig | None:
    """Latent attention's sizes; None where the model has keys and values. Raises ValueError, or KeyError."""
    if raw.get("kv_lora_rank") is None:
        return None
    query_rank = raw.get("q_lora_rank")
    return LatentConfig(
        rank=int(raw["kv_lora_rank"]),
        rope_dim=int(raw["qk_rope_head_dim"]),
        nope_dim=int(raw["qk_nope_head_dim"]),
        value_dim=int(raw["v_head_dim"]),
        query_rank=None if query_rank is None else int(query_rank),
        interleaved=bool(first(raw, "rope_interleave", default=True)),
    )
