"""A few rows times a large bfloat16 matrix, fused in C: every weight is read and widened once for four rows.

Processors without 16-bit matrix products have no fast way to do this, and a decode step is made of it. Against torch's
best on AVX2 with two threads, 3072 x 576: 1.6 times as fast for 2 rows, 2.8 for 8, 1.3 for 16; one row is bound by
memory either way.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [rows, inputs], W [outputs, inputs] -> x W^T [rows, outputs], dense, in x's dtype."""


def few_rows() -> Multiply | None:
    """Return the product, or None where the extension was not built or the processor lacks what it needs."""
    try:
        # Optional at build time; its threads are torch's, which must be loaded before it.
        module = importlib.import_module("kvferry_engine._few_rows")
    except ImportError:
        return None
    return _bind(module.ffi, module.lib) if module.lib.kv_few_rows_supported() else None


def _bind(ffi: Any, lib: Any) -> Multiply:  # noqa: ANN401 - cffi's own objects
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        outputs, inputs = weight.shape
        wide = x.float().contiguous()
        y = torch.empty((len(x), outputs), dtype=torch.bfloat16)
        lib.kv_few_rows(
            ffi.cast("uint16_t *", weight.data_ptr()),
            ffi.cast("float *", wide.data_ptr()),
            ffi.cast("uint16_t *", y.data_ptr()),
            len(x),
            outputs,
            inputs,
        )
        return y

    return multiply
