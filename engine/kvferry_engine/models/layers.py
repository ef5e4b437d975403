"""Layers that models share, on plain tensors: parameters, RMSNorm, rotary embedding."""

import math
from collections.abc import Sequence

import torch

from kvferry_engine.config import RopeConfig
from kvferry_engine.models.linear import Linear


class Parameters:
    """Tensors of a model under construction, and which checkpoint tensor fills which of their rows."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self.targets: dict[str, torch.Tensor] = {}
        """Checkpoint name -> the view that its tensor is copied into."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Allocate a parameter that the checkpoint tensor `name` fills."""
        value = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.targets[name] = value
        return value

    def linear(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool = False) -> Linear:
        """Allocate one linear map whose outputs are those of `parts`, (checkpoint prefix, outputs) each, in order."""
        outputs = sum(size for _, size in parts)
        weight = torch.empty((outputs, inputs), dtype=self.dtype, device=self.device)
        offsets = torch.empty(outputs, dtype=self.dtype, device=self.device) if bias else None
        row = 0
        for prefix, size in parts:
            self.targets[f"{prefix}.weight"] = weight[row : row + size]
            if offsets is not None:
                self.targets[f"{prefix}.bias"] = offsets[row : row + size]
            row += size
        return Linear(weight, offsets)

    def norm(self, name: str, size: int, eps: float) -> "RmsNorm":
        """Allocate an RMSNorm over `size` elements."""
        return RmsNorm(self.tensor(f"{name}.weight", size), eps)


class RmsNorm:
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = torch.full((1, 1), eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each row of x [T, E]; in x's dtype again."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype).mul_(self.weight)


class Rope:
    """Rotary position embedding; the tables are float32 [positions, head_dim / 2]."""

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, device: str = "cpu") -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config, head_dim))
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
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
