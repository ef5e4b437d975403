"""Linear maps, multiplied in whichever of the equivalent ways the processor does fastest.

A decode step is bound by reading the weights once, which kernels of our own do in bfloat16. On CPUs with AVX2 they
multiply many rows as well, 1.4 times as fast as the library does weights that are widened for it, and on those with AMX
0.8 to 1.9 times as fast as the library does with tiles of its own. Of the libraries, measured with AVX2: they multiply
few rows by a large matrix two to three times faster as W x^T than as x W^T; one row alone is not spread over the cores;
and dtypes of 16 bits have no fast kernel beyond a row or two, so widening the weights, a layer at a time and thus
within the cache, is up to eight times faster.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from kvferry_engine.kernels import AMX, AVX2, AVX512, Kernels, kernels_for

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [rows, inputs], W [outputs, inputs] -> x W^T [rows, outputs], dense, in x's dtype."""
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a tensor over the ranks, in place."""

FEW_ROWS = 128
"""Up to here W x^T and a transposition of the result are worth more than x W^T."""
NARROW_ROWS = 2
"""Up to here a 16-bit product is bound by reading the weights, of which it reads half the bytes."""
FUSED_ROWS = {AVX2: 16, AVX512: 32, AMX: 64}
"""Up to here a step's layers are one call, from tokens to logits, and a product is that of few rows.

With AVX2 it is faster up to here than the one that widens and packs weights first, with AVX-512 it is as fast as the
library's. With AMX few rows and many are one product, and the layers of more rows are one call as well.
"""
WIDENED = 1 << 21
"""Elements of a matrix that are widened at a time, so that they are still in the cache when they are multiplied."""
FAST_NARROW = {"AVX512"}
"""CPU capabilities with fast 16-bit matrix products."""


class Linear:
    """y = x W^T + b, W [outputs, inputs]; where ranks hold some inputs each, the sum of their x W^T, plus b."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, reduce: Reduce | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._reduce = reduce
        self._multiply = fastest(weight.dtype, weight.device.type)

    @property
    def plain(self) -> bool:
        """Whether it is x W^T and no more."""
        return self.bias is None and self._reduce is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, inputs] to [T, outputs]."""
        y = self._multiply(x, self.weight)
        if self._reduce is not None:
            y = self._reduce(y)
        return y if self.bias is None else y.add_(self.bias)


def fastest(dtype: torch.dtype, device: str) -> Multiply:
    """Choose how to multiply by weights of `dtype` on `device`; the weights are dense."""
    if device != "cpu":
        return functional.linear
    if dtype == torch.float32:
        return _wide
    fast = torch.backends.cpu.get_cpu_capability() in FAST_NARROW
    kernels = kernels_for(dtype, device)
    if kernels is None:
        return functional.linear if fast else _narrow
    return _few_or(kernels, functional.linear if kernels.level == AVX512 else kernels.many_rows)


def multiply_each(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Product of each head with a matrix of its own: x [H, T, inputs], weights [H, inputs, outputs]; in x's dtype."""
    narrow = x.dtype != torch.float32 and torch.backends.cpu.get_cpu_capability() not in FAST_NARROW
    if x.device.type != "cpu" or not narrow:
        return torch.bmm(x, weights)
    y = torch.empty((*x.shape[:2], weights.shape[2]), dtype=x.dtype)
    block = max(1, WIDENED // weights[0].numel())
    for head in range(0, len(x), block):
        heads = slice(head, head + block)
        y[heads] = torch.bmm(x[heads].float(), weights[heads].float())
    return y


def _wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    alone = len(x) == 1
    if len(x) > FEW_ROWS or (alone and torch.get_num_threads() == 1):
        return functional.linear(x, weight)
    if alone:
        return (weight @ x.repeat(2, 1).t())[:, :1].t().contiguous()
    return (weight @ x.t()).t().contiguous()


def _narrow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if len(x) <= NARROW_ROWS:
        return functional.linear(x, weight)
    y = torch.empty((len(x), len(weight)), dtype=x.dtype)
    columns = x.float().t()
    block = max(1, WIDENED // weight.shape[1])
    for row in range(0, len(weight), block):
        y[:, row : row + block] = (weight[row : row + block].float() @ columns).t()
    return y


def most_rows(kernels: Kernels) -> int:
    """Rows up to which our own kernel multiplies."""
    return FUSED_ROWS[kernels.level]


def _few_or(kernels: Kernels, many: Multiply) -> Multiply:
    """Few rows by our own kernel, more of them by `many`."""
    most = most_rows(kernels)

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.few_rows(x, weight) if len(x) <= most else many(x, weight)

    return multiply
