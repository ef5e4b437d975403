"""Weights from safetensors files into a model, tensor by tensor, each rank reading what it holds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kvferry_engine.attention import AttentionBackend
from kvferry_engine.attention.choice import Wanted, attention_for
from kvferry_engine.config import ModelConfig
from kvferry_engine.draft_layers import is_drafting, with_stored_drafts
from kvferry_engine.dtypes import torch_dtype
from kvferry_engine.errors import ModelError
from kvferry_engine.fp8 import BlockScales
from kvferry_engine.identity import weight_files
from kvferry_engine.models import Model, model_class
from kvferry_engine.models.parameters import Parameters
from kvferry_engine.safetensors_file import TensorFile, open_tensors
from kvferry_engine.shard import ALONE, Shard
from kvferry_engine.split import check_ranks

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

NAMED_IN_ERRORS = 8


def load_model(
    folder: str | Path,
    dtype: str | torch.dtype,
    *,
    device: str = "cpu",
    attention: AttentionBackend | Wanted = "auto",
    progress: Progress | None = None,
    shard: Shard = ALONE,
    drafts: bool = True,
) -> Model:
    """Build the model of a Hugging Face style folder, or one rank's shard of it, with its weights in `dtype`.

    A rank reads no more of the files than what it holds. Raises UnknownArchitecture, or ModelError naming the tensors
    that are missing, unexpected or misshapen, or the number that can't be split over the ranks. `drafts`: with the
    layers that draft (MTP), where the folder has their weights.
    """
    folder = Path(folder)
    stored = ModelConfig.from_folder(folder)
    config = with_stored_drafts(folder, stored) if drafts else replace(stored, draft_layers=0)
    check_ranks(config, shard.ranks)
    build = model_class(config.architecture)
    if isinstance(attention, str):
        attention = attention_for(config, shard, torch_dtype(dtype), device, attention)
    model = build(config, attention, dtype=torch_dtype(dtype), device=device, shard=shard)
    _fill(model, folder, stored, progress or _silent)
    return model


def _fill(model: Model, folder: Path, stored: ModelConfig, progress: Progress) -> None:
    targets = dict(model.parameters.targets)
    files = weight_files(folder)
    scales = BlockScales(files, stored.weight_blocks)
    total, done = sum(path.stat().st_size for path in files), 0
    unexpected: list[str] = []
    for path in files:
        size = path.stat().st_size
        with open_tensors(path) as file:
            names = [name for name in file.keys() if not scales.holds(name)]  # noqa: SIM118 - not a mapping
            for index, name in enumerate(names):
                taken = _take(name, file, scales, targets, model.parameters)
                if not taken and not _redundant(name, model.config, stored):
                    unexpected.append(name)
                progress(done + size * (index + 1) // len(names), total)
        done += size
    unexpected += [name for name in scales.unused() if not _redundant(name, model.config, stored)]
    _check_complete(folder, missing=list(targets), unexpected=unexpected)


def _take(
    name: str, file: TensorFile, scales: BlockScales, targets: dict[str, torch.Tensor], parameters: Parameters
) -> bool:
    """Copy what this rank holds of tensor `name` to its place among `targets`, the places still empty.

    Returns whether it has one.
    """
    if name in targets:
        target, part = targets.pop(name), parameters.slices.get(name)
        _check_shape(name, file, part.shape if part else tuple(target.shape))
        target.copy_(scales.read(file, name, part.index if part else None))
        return True
    fused = parameters.fused.get(name)
    if fused is None or not all(part in targets for part in fused.parts):
        return False
    _check_shape(name, file, fused.shape)
    whole = file.get_slice(name)
    for part_name, index in fused.parts.items():
        targets.pop(part_name).copy_(whole[index])
    return True


def _check_shape(name: str, file: TensorFile, wanted: tuple[int, ...]) -> None:
    found = file.get_slice(name).get_shape()
    if tuple(found) != wanted:
        msg = f"tensor {name} has shape {list(found)}, the configuration asks for {list(wanted)}"
        raise ModelError(msg)


def _redundant(name: str, config: ModelConfig, stored: ModelConfig) -> bool:
    """Tensors that some checkpoints store although they follow from others, and drafting layers that nobody wants."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
        return True
    if not is_drafting(name, stored):
        return False
    # The drafting layer shares the model's embedding and head, of which checkpoints hold copies under its name.
    return not config.draft_layers or name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))


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
