"""The CUDA driver API where torch has no way to it: loading it, and turning its codes into exceptions."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvferry_engine.errors import EngineError

_MISSING = "{why}: what a GPU computes with needs NVIDIA's driver and cuda-python (pip install 'kvferry[cuda]')"


class CudaError(EngineError):
    """The CUDA driver refused something; the text names the call and its code."""


def load() -> Any:  # noqa: ANN401 - a module without types
    """Return cuda.bindings.driver. Raises CudaError where it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaError(_MISSING.format(why=error)) from error


def call(function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - whatever the call gives
    """Call the driver; returns what the call gives beside its code, if anything. Raises CudaError."""
    try:
        code, *values = function(*arguments)
    except RuntimeError as error:  # there is no libcuda, or an old one lacks the call
        raise CudaError(_MISSING.format(why=error)) from error
    if int(code) != 0:
        msg = f"{getattr(function, '__name__', function)} failed: {getattr(code, 'name', code)}"
        raise CudaError(msg)
    return values[0] if values else None


@contextmanager
def current(device: str) -> Iterator[None]:
    """Make torch's context of a GPU current in this thread, in which the driver's calls then work."""
    with torch.cuda.device(device):
        # The first use of a device makes its context; none is made while a graph is captured.
        if not torch.cuda.is_current_stream_capturing():
            torch.empty(1, device=device)
        yield


def ordinal(device: str) -> int:
    """Number of the GPU that a torch device names."""
    return int(device.partition(":")[2] or 0)
