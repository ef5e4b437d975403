"""Rotary position embedding, and the stretched frequencies of long contexts."""

import math

import torch

from kvferry_engine.kernels import kernels_for
from kvferry_engine.rope_config import RopeConfig

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a batch's positions, each [T, 1, D]."""


class Rope:
    """Rotary position embedding: cosines and signed sines of every position, [positions, head_dim] each."""

    def __init__(
        self, config: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config, head_dim))
        cos, sin = angles.cos() * config.magnitude, angles.sin() * config.magnitude
        self.cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: torch.Tensor) -> Turn:
        """Cosines and signed sines of `positions` [T], each [T, 1, head_dim], for `rotate`."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [T, heads, head_dim] by its positions: dimension i pairs with i + head_dim / 2."""
    if (kernels := kernels_for(x.dtype, x.device)) is not None:
        return kernels.rotate(x, cos, sin)
    # The roll swaps the two halves; the minus sign of the first one is in the sines.
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [T, heads, head_dim] whose dimension 2 i pairs with 2 i + 1; the pairs come out apart, as in `rotate`."""
    return rotate(x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2), cos, sin)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    return STRETCHES[config.kind](config, frequencies) if config.kind in STRETCHES else frequencies


def _llama3_stretch(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow the long wavelengths by `factor`, keep the short ones, and blend between the two bounds."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_positions / wavelengths
    blend = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn_stretch(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow dimensions that turn rarely by `factor`, keep those that turn often, and blend between, by dimension."""
    low, high = (_dimension_of(config, turns, 2 * len(frequencies)) for turns in (config.fast_turns, config.slow_turns))
    if config.whole_dimensions:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return slowed * frequencies / config.factor + (1 - slowed) * frequencies


def _dimension_of(config: RopeConfig, turns: float, head_dim: int) -> float:
    """Pair of dimensions that turns so often within the context of the pre-training."""
    return head_dim * math.log(config.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


STRETCHES = {"llama3": _llama3_stretch, "yarn": _yarn_stretch}
