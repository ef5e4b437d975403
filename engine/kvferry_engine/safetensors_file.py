"""Opening safetensors files, with the types that the library leaves out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kvferry_engine.errors import ModelError


class TensorSlices(Protocol):
    """A stored tensor of which parts can be read."""

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""

    def __getitem__(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        """Read a part."""


class TensorFile(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]:
        """Names of its tensors."""

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""

    def get_slice(self, name: str) -> TensorSlices:
        """Return a tensor of which nothing has been read yet."""


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a file; raises ModelError when it cannot be read, now or while it is open."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ModelError(msg) from error
