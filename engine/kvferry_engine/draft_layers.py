"""Layers that draft (MTP), which a configuration may count although the folder has no weights for them."""

from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError
from kvferry_engine.identity import weight_files


def with_stored_drafts(folder: Path, config: ModelConfig) -> ModelConfig:
    """Return the configuration without the drafting layers that the folder lacks. Raises ModelError.

    Reads the headers of the files alone, and without torch.
    """
    if not config.draft_layers or any(_has_drafts(path, config) for path in weight_files(folder)):
        return config
    return replace(config, draft_layers=0)


def is_drafting(name: str, config: ModelConfig) -> bool:
    """Whether a weight of this name is a drafting layer's."""
    layers = range(config.layers, config.layers + config.draft_layers)
    return any(name.startswith(f"model.layers.{index}.") for index in layers)


def _has_drafts(path: Path, config: ModelConfig) -> bool:
    try:
        with safe_open(path, framework="numpy") as file:
            return any(is_drafting(name, config) for name in file.keys())  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ModelError(msg) from error
