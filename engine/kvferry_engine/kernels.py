"""Kernels in C for bfloat16 on CPUs, between the tensors of torch and the memory of the KV pool.

A decode step of a small model is a few hundred operations, none of which takes longer than it takes torch to begin it,
beside products that torch reads weights for at half the memory's rate. What a row gives does not depend on the rows
beside it: a token is computed to the same bits alone, in a batch, and behind drafts.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Layer = Any
"""A KvLayer of csrc/kernels.h."""
Layers = Callable[..., Layer]
"""Index of a layer, query heads that read it -> the layer, until it is asked for another."""
AVX2, AVX512, AMX = 1, 2, 3
"""What `Kernels.level` may be: the second has products of bfloat16 in hardware, the third those of whole tiles."""


class Kernels:
    """The functions of csrc/kernels.h. Tensors are bfloat16 and dense but for what is said of strides."""

    def __init__(self, ffi: Any, lib: Any) -> None:  # noqa: ANN401 - cffi's own objects
        self._lib = lib
        self._cast = ffi.cast
        self.new = ffi.new
        """Make a structure of csrc/kernels.h, which Python owns."""
        self._bf16 = ffi.typeof("uint16_t *")
        self._floats = ffi.typeof("float *")
        self._octets = ffi.typeof("uint8_t *")
        self._ints = ffi.typeof("int64_t *")

    @property
    def level(self) -> int:
        """Instructions that are used, one of those above."""
        return int(self._lib.kv_level())

    def few_rows(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] times W [outputs, inputs]: x W^T [rows, outputs]. Bound by reading W, for few rows."""
        return self._product(self._lib.kv_few_rows, x, weight)

    def many_rows(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The same, bound by multiplying, for many rows; not with AVX512, where the library is as fast."""
        return self._product(self._lib.kv_many_rows, x, weight)

    def _product(self, product: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - of cffi
        x = x.contiguous()
        (rows, inputs), outputs = x.shape, len(weight)
        y = torch.empty((rows, outputs), dtype=torch.bfloat16)
        if product(self.at(weight), self.at(x), self.at(y), rows, outputs, inputs):
            raise MemoryError
        return y

    def score(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return what `few_rows` does, in float32."""
        x = x.contiguous()
        (rows, inputs), outputs = x.shape, len(weight)
        y = torch.empty((rows, outputs), dtype=torch.float32)
        if self._lib.kv_score(self.at(weight), self.at(x), self.floats(y), rows, outputs, inputs):
            raise MemoryError
        return y

    def rms_norm(self, x: torch.Tensor, weights: torch.Tensor, eps: float, of_first: int = 1) -> torch.Tensor:
        """x / rms(x) times a weight, x [T, heads, size] or [T, size], whose tokens may lie apart; dense.

        `weights` [2, size], or one alone where all heads are the first: of the first `of_first` heads, of the others.
        """
        (tokens, *within), size = x.shape[:-1], x.shape[-1]
        heads = within[0] if within else 1
        y = torch.empty(x.shape, dtype=torch.bfloat16)
        self._lib.kv_rms_norm(self.at(x), self.at(weights), self.at(y), tokens, heads, of_first, x.stride(0), size, eps)
        return y

    def silu_times(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) times up, one behind the other in [T, 2 F]: [T, F]."""
        rows, both = gate_up.shape
        y = torch.empty((rows, both // 2), dtype=torch.bfloat16)
        self._lib.kv_silu_times(self.at(gate_up), self.at(y), rows, both // 2)
        return y

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, heads, D], tokens and heads may lie apart, turned by cosines and signed sines [T, 1, D]; dense."""
        y = torch.empty(x.shape, dtype=torch.bfloat16)
        at, (stride, head_stride, _) = self.at, x.stride()
        self._lib.kv_rotate(at(x), at(cos), at(sin), at(y), *x.shape[:2], stride, head_stride, x.shape[2])
        return y

    def layers(self, pool: torch.Tensor) -> Layers:
        """Layers of a pool [layer, page, kv head, K/V, token, D], which outlives what this returns."""
        kv_heads, _, page_size, head_dim = pool.shape[2:]
        view = self.new("KvLayer *", (self.at(pool), kv_heads, page_size, head_dim, 1, head_dim**-0.5))
        first, stride = pool.data_ptr(), pool.stride(0) * pool.element_size()

        def layer(index: int, heads: int = kv_heads) -> Layer:
            view.pages, view.group = self._cast(self._bf16, first + index * stride), heads // kv_heads
            return view

        return layer

    def append(self, layer: Layer, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write k and v [T, kv heads, D], whose tokens may lie apart, to `slots`, int64 [T]: page x size + place."""
        at = self.at
        self._lib.kv_append(layer, at(k), k.stride(0), at(v), v.stride(0), self.ints(slots), len(slots))

    def attend_rows(self, layer: Layer, q: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Attend from each of q [T, heads, D], tokens may lie apart, to the first `lens` tokens [T] of its `tables`.

        `tables` are pages, int64 [T, most pages]. Returns [T, heads, D], dense.
        """
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        self._lib.kv_attend_rows(
            layer, self.at(q), q.stride(0), self.at(out), self.ints(tables), tables.shape[1], self.ints(lens), len(q)
        )
        return out

    def attend_chunk(
        self, layer: Layer, q: torch.Tensor, table: torch.Tensor, start: int, work: torch.Tensor
    ) -> torch.Tensor:
        """Attend from q [T, heads, D] of one sequence, tokens may lie apart, from position `start` on.

        Each sees all up to its own. `table` are the sequence's pages, int64; `work` comes from `chunk_work`. Returns
        [T, heads, D], dense.
        """
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        self._lib.kv_attend_chunk(
            layer,
            self.at(q),
            q.stride(0),
            self.at(out),
            self.ints(table),
            start,
            len(q),
            self._cast(self._octets, work.data_ptr()),
        )
        return out

    def chunk_work(self, layer: Layer, kv_len: int) -> torch.Tensor:
        """Work space for `attend_chunk` over so many tokens; all layers may share it."""
        return torch.empty(self._lib.kv_chunk_work(layer, kv_len), dtype=torch.uint8)

    def run_layers(self, stack: Any, step: Any, first: int, end: int) -> None:  # noqa: ANN401 - structures of cffi
        """Run halves [first, end) of a KvStack's layers on the rows of a KvStep."""
        if self._lib.kv_run_layers(stack, step, first, end):
            raise MemoryError

    def at(self, tensor: torch.Tensor | None) -> Any:  # noqa: ANN401 - a cffi pointer
        """Address of a tensor in bfloat16, which the caller keeps."""
        return self._cast(self._bf16, 0 if tensor is None else tensor.data_ptr())

    def floats(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401
        """Address of a tensor of float32, which the caller keeps."""
        return self._cast(self._floats, tensor.data_ptr())

    def ints(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401
        """Address of a tensor of int64, which the caller keeps."""
        return self._cast(self._ints, tensor.data_ptr())


@cache
def kernels() -> Kernels | None:
    """Return them, or None where the extension was not built or the processor lacks what it needs."""
    try:
        # Optional at build time; its threads are torch's, which must be loaded before it.
        module = importlib.import_module("kvferry_engine._kernels")
    except ImportError:
        return None
    return Kernels(module.ffi, module.lib) if module.lib.kv_level() else None


def kernels_for(dtype: torch.dtype, device: torch.device | str) -> Kernels | None:
    """Return them where they fit tensors of `dtype` on `device`."""
    kind = device if isinstance(device, str) else device.type
    return kernels() if dtype == torch.bfloat16 and kind == "cpu" else None
