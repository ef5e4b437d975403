"""Weights from safetensors files into a model, tensor by tensor, each rank reading what it holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kvferry_engine.attention import AttentionBackend
from kvferry_engine.attention.torch_cpu import TorchAttention
from kvferry_engine.config import ModelConfig
from kvferry_engine.dtypes import torch_dtype
from kvferry_engine.errors import ModelError
from kvferry_engine.identity import weight_files
from kvferry_engine.models import Model, model_class
from kvferry_engine.models.parameters import Parameters
from kvferry_engine.shard import ALONE, Shard, check_ranks

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

NAMED_IN_ERRORS = 8


class _Slices(Protocol):
    """A stored tensor of which parts can be read."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, index: tuple[int | slice, ...]) -> torch.Tensor: ...


class _Tensors(Protocol):
    """An open safetensors file, whose own types say less."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_slice(self, name: str) -> _Slices: ...


def load_model(
    folder: str | Path,
    dtype: str | torch.dtype,
    *,
    device: str = "cpu",
    attention: AttentionBackend | None = None,
    progress: Progress | None = None,
    shard: Shard = ALONE,
) -> Model:
    """Build the model of a Hugging Face style folder, or one rank's shard of it, with its weights in `dtype`.

    A rank reads no more of the files than what it holds. Raises UnknownArchitecture, or ModelError naming the tensors
    that are missing, unexpected or misshapen, or the number that can't be split over the ranks.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    check_ranks(config, shard.ranks)
    build = model_class(config.architecture)
    model = build(config, attention or TorchAttention(), dtype=torch_dtype(dtype), device=device, shard=shard)
    _fill(model, folder, progress or _silent)
    return model


def _fill(model: Model, folder: Path, progress: Progress) -> None:
    targets = dict(model.parameters.targets)
    files = weight_files(folder)
    total, done = sum(path.stat().st_size for path in files), 0
    unexpected: list[str] = []
    for path in files:
        with _open(path) as file:
            left = [name for name in file.keys() if not _take(name, file, targets, model.parameters)]  # noqa: SIM118
        unexpected += [name for name in left if not _redundant(name, model.config)]
        done += path.stat().st_size
        progress(done, total)
    _check_complete(folder, missing=list(targets), unexpected=unexpected)


@contextmanager
def _open(path: Path) -> Iterator[_Tensors]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ModelError(msg) from error


def _take(name: str, file: _Tensors, targets: dict[str, torch.Tensor], parameters: Parameters) -> bool:
    """Copy what this rank holds of tensor `name` to its place among `targets`, the places still empty.

    Returns whether it has one.
    """
    if name in targets:
        target, part = targets.pop(name), parameters.slices.get(name)
        _check_shape(name, file, part.shape if part else tuple(target.shape))
        target.copy_(file.get_slice(name)[part.index] if part else file.get_tensor(name))
        return True
    fused = parameters.fused.get(name)
    if fused is None or not all(part in targets for part in fused.parts):
        return False
    _check_shape(name, file, fused.shape)
    whole = file.get_slice(name)
    for part_name, index in fused.parts.items():
        targets.pop(part_name).copy_(whole[index])
    return True


def _check_shape(name: str, file: _Tensors, wanted: tuple[int, ...]) -> None:
    found = file.get_slice(name).get_shape()
    if tuple(found) != wanted:
        msg = f"tensor {name} has shape {list(found)}, the configuration asks for {list(wanted)}"
        raise ModelError(msg)


def _redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints store although they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _check_complete(folder: Path, *, missing: list[str], unexpected: list[str]) -> None:
    faults = [f"{kind} {_list(names)}" for kind, names in (("lacks", missing), ("has unexpected", unexpected)) if names]
    if faults:
        msg = f"the weights in {folder} do not fit its config.json: it {'; it '.join(faults)}"
        raise ModelError(msg)


def _list(names: list[str]) -> str:
    more = len(names) - NAMED_IN_ERRORS
    return ", ".join(sorted(names)[:NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")


def _silent(_done: int, _total: int) -> None:
    return
