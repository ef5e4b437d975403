"""Weights stored as 8-bit floats with a scale per block, as DeepSeek releases them: read back as float32, in slices.

Beside a weight `name`, [outputs, inputs] in float8_e4m3, stands `name_scale_inv`, [blocks of outputs, blocks of inputs]
in float32: what the weight's numbers of a block are to be multiplied by.
"""

from pathlib import Path

import torch

from kvferry_engine.errors import ModelError
from kvferry_engine.safetensors_file import TensorFile, open_tensors

SUFFIX = "_scale_inv"
STORED = torch.float8_e4m3fn


class BlockScales:
    """All scales of a folder; they are a sixteen-thousandth of the weights."""

    def __init__(self, files: list[Path], blocks: tuple[int, int] | None) -> None:
        """Read the scales in `files`; none if `blocks`, rows and columns of a block, is None. Raises ModelError."""
        self._blocks = blocks
        self._scales = _read(files) if blocks is not None else {}
        self._used: set[str] = set()

    def unused(self) -> list[str]:
        """Names of the scales whose weights were not read."""
        return [f"{name}{SUFFIX}" for name in self._scales if name not in self._used]

    def holds(self, name: str) -> bool:
        """Tell whether tensor `name` is one of the scales."""
        return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in self._scales

    def read(self, file: TensorFile, name: str, index: tuple[int | slice, ...] | None = None) -> torch.Tensor:
        """Return what tensor `name` of `file`, or its part at `index`, is worth. Raises ModelError."""
        stored = file.get_slice(name)[index] if index is not None else file.get_tensor(name)
        if stored.dtype != STORED:
            return stored
        scale = self._scale_of(name, file.get_slice(name).get_shape())
        outputs, inputs = index or (slice(0, size) for size in stored.shape)
        assert isinstance(outputs, slice)
        assert isinstance(inputs, slice)
        return dequantise(stored, scale, self._blocks or (1, 1), (outputs.start, inputs.start))

    def _scale_of(self, name: str, shape: list[int]) -> torch.Tensor:
        if name not in self._scales:
            why = "config.json has no quantization_config" if self._blocks is None else f"there is no {name}{SUFFIX}"
            msg = f"tensor {name} is stored in 8 bits, and {why}"
            raise ModelError(msg)
        self._used.add(name)
        scale = self._scales[name]
        wanted = [-(-size // block) for size, block in zip(shape, self._blocks or (), strict=False)]
        if list(scale.shape) != wanted or len(shape) != 2:
            msg = f"tensor {name}{SUFFIX} has shape {list(scale.shape)}, its weight of {shape} asks for {wanted}"
            raise ModelError(msg)
        return scale


def dequantise(
    stored: torch.Tensor, scale: torch.Tensor, blocks: tuple[int, int], origin: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Multiply `stored` [rows, columns], which begins at `origin` of its weight, by its blocks' scales; float32."""
    rows, columns = (
        torch.arange(start, start + size) // block
        for start, size, block in zip(origin, stored.shape, blocks, strict=True)
    )
    return stored.float().mul_(scale[rows][:, columns])


def _read(files: list[Path]) -> dict[str, torch.Tensor]:
    scales = {}
    for path in files:
        with open_tensors(path) as file:
            names = [name for name in file.keys() if name.endswith(SUFFIX)]  # noqa: SIM118 - not a mapping
            scales.update({name.removesuffix(SUFFIX): file.get_tensor(name).float() for name in names})
    return scales
