"""RMSNorm, over the residual stream and over single heads."""

import torch

from kvferry_engine.kernels import kernels_for


class RmsNorm:
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._eps, self._added = eps, _added(weight, eps)
        self._kernels = kernels_for(weight.dtype, weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each row of x [T, E]; in x's dtype again."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x, self.weight, self._eps)
        return _normalise(x, self._added).mul_(self.weight)


class HeadNorm:
    """RMSNorm of every head by itself: query heads share one weight, key heads another."""

    def __init__(self, weights: torch.Tensor, eps: float, *, heads: int, kv_heads: int) -> None:
        self.weights = weights
        """Of queries and of keys, [2, D]."""
        self._eps, self._added, self._heads = eps, _added(weights, eps), heads
        self._which = torch.tensor([0] * heads + [1] * kv_heads, device=weights.device)
        self._kernels = kernels_for(weights.dtype, weights.device)

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalise queries and keys together, [T, H + K, D]; in their dtype again."""
        if self._kernels is not None:
            return self._kernels.rms_norm(qk, self.weights, self._eps, self._heads)
        return _normalise(qk, self._added).mul_(self.weights[self._which])


def _normalise(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype)


def _added(weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.full((1, 1), eps, dtype=torch.float32, device=weight.device)
