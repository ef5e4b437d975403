"""Which rotary embedding a model has, read from rope_parameters or from rope_theta beside rope_scaling."""

import math
from dataclasses import dataclass
from typing import Any

from kvferry_engine.config_fields import first

DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for kinds `llama3` and `yarn`, the stretch of its long wavelengths."""

    theta: float = DEFAULT_ROPE_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    """Context length of the pre-training that the stretch starts from, in tokens."""
    fast_turns: float = 32.0
    """YaRN: dimensions that turn at least so often within that context are kept."""
    slow_turns: float = 1.0
    """YaRN: dimensions that turn at most so often are slowed by `factor`."""
    whole_dimensions: bool = True
    """YaRN: whether the two bounds are rounded outwards to whole dimensions."""
    magnitude: float = 1.0
    """What the cosines and sines are multiplied by."""
    score_magnitude: float = 1.0
    """What the scores of latent attention are multiplied by, beside the scale that follows from the head's size."""


def read_rope(raw: dict[str, Any], max_positions: int) -> RopeConfig:
    """Rope of either spelling; raises ValueError for a kind that isn't known, KeyError for an absent field."""
    rope: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = str(first(rope, "rope_type", "type", default="default"))
    theta = float(first({**raw, **rope}, "rope_theta", default=DEFAULT_ROPE_THETA))
    if float(first({**raw, **rope}, "partial_rotary_factor", default=1.0)) != 1.0:
        msg = "partial_rotary_factor other than 1 is not supported"
        raise ValueError(msg)
    original = int(first(rope, "original_max_position_embeddings", default=max_positions))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=original,
        )
    if kind != "yarn":
        msg = f"rope type {kind!r} is not supported; supported are default, llama3, yarn"
        raise ValueError(msg)
    return _yarn(rope, theta, original, max_positions)


def _yarn(rope: dict[str, Any], theta: float, original: int, max_positions: int) -> RopeConfig:
    factor = float(first(rope, "factor", default=max_positions / original))
    mscale, mscale_all = (float(first(rope, name, default=0.0)) for name in ("mscale", "mscale_all_dim"))
    both = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        # A zero means the default here, as in the reference.
        fast_turns=float(rope.get("beta_fast") or 32),
        slow_turns=float(rope.get("beta_slow") or 1),
        whole_dimensions=bool(first(rope, "truncate", default=True)),
        magnitude=float(first(rope, "attention_factor", default=both)),
        score_magnitude=_mscale(factor, mscale_all) ** 2 if mscale_all else 1.0,
    )


def _mscale(factor: float, weight: float) -> float:
    """How much sharper attention must be over a context `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
