"""Rotary position embedding, and the stretched frequencies of long contexts."""

import math

import torch

from kvferry_engine.config import RopeConfig

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a batch's positions, each [T, 1, D]."""


class Rope:
    """Rotary position embedding; the tables are float32 [positions, head_dim / 2]."""

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, device: str = "cpu") -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config, head_dim))
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Turn:
        """Cosines and signed sines of `positions` [T], each [T, 1, head_dim], for `rotate`."""
        cos, sin = self.cos[positions], self.sin[positions]
        return (
            torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype),
        )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [T, heads, head_dim] by its positions: dimension i pairs with i + head_dim / 2."""
    # The roll swaps the two halves; the minus sign of the first one is in the sines.
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    return _llama3_stretch(config, frequencies) if config.kind == "llama3" else frequencies


def _llama3_stretch(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow the long wavelengths by `factor`, keep the short ones, and blend between the two bounds."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_positions / wavelengths
    blend = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies
