"""Weights from safetensors files into a model, tensor by tensor."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvferry_engine.attention import AttentionBackend
from kvferry_engine.attention.torch_cpu import TorchAttention
from kvferry_engine.config import ModelConfig
from kvferry_engine.dtypes import torch_dtype
from kvferry_engine.errors import ModelError
from kvferry_engine.identity import weight_files
from kvferry_engine.models import Model, model_class
from kvferry_engine.models.parameters import Fused

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

NAMED_IN_ERRORS = 8


def load_model(
    folder: str | Path,
    dtype: str | torch.dtype,
    *,
    device: str = "cpu",
    attention: AttentionBackend | None = None,
    progress: Progress | None = None,
) -> Model:
    """Build the model of a Hugging Face style folder with its weights in `dtype`.

    Raises UnknownArchitecture, or ModelError naming the tensors that are missing, unexpected or misshapen.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    build = model_class(config.architecture)
    model = build(config, attention or TorchAttention(), dtype=torch_dtype(dtype), device=device)
    _fill(model, folder, progress or _silent)
    return model


def _fill(model: Model, folder: Path, progress: Progress) -> None:
    targets = dict(model.parameters.targets)
    files = weight_files(folder)
    total, done = sum(path.stat().st_size for path in files), 0
    unexpected: list[str] = []
    for path in files:
        for name, tensor in _tensors(path):
            target = _claim(name, targets, model.parameters.fused)
            if target is not None:
                _copy(name, tensor, target)
            elif not _redundant(name, model.config):
                unexpected.append(name)
            done += tensor.nbytes
            progress(min(done, total), total)
    _check_complete(folder, missing=list(targets), unexpected=unexpected)
    progress(total, total)


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ModelError(msg) from error


def _claim(name: str, targets: dict[str, torch.Tensor], fused: dict[str, Fused]) -> torch.Tensor | None:
    """Take the place of tensor `name` out of `targets`, the places still empty; None where it has none."""
    if name in targets:
        return targets.pop(name)
    if name not in fused or not all(part in targets for part in fused[name].parts):
        return None
    for part in fused[name].parts:
        del targets[part]
    return fused[name].tensor


def _copy(name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    if tensor.shape != target.shape:
        msg = f"tensor {name} has shape {list(tensor.shape)}, the configuration asks for {list(target.shape)}"
        raise ModelError(msg)
    target.copy_(tensor)


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
