"""Check of a model folder: is everything there that a node reads."""

import importlib
from pathlib import Path
from typing import Any

import orjson

from kvferry.cli.doctor.finding import Finding, fail, ok, warn

NEEDED = ("config.json", "tokenizer.json")
INDEX = "model.safetensors.index.json"


def model(folder: Path | None) -> Finding:
    """A folder in Hugging Face form; None: the default model, which is made when needed."""
    if folder is None:
        return _default()
    if not folder.is_dir():
        return fail("model", f"{folder} is no folder", "give --model the folder that holds config.json")
    lacking = [name for name in NEEDED if not (folder / name).is_file()] + _lacking_weights(folder)
    if lacking:
        return fail("model", f"{folder} lacks {', '.join(lacking)}", "copy the whole folder, weights included")
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
        architecture = ", ".join(config["architectures"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        return fail("model", f"{folder / 'config.json'} can't be read: {error!r}", "copy it again")
    if why := _unknown(config["architectures"][0]):
        return fail("model", f"{folder}: {why}", "give --model a model of an architecture that is known")
    if why := _broken(folder):
        return fail("model", str(why), "copy the weights again")
    if not _has_template(folder):
        return warn("model", f"{folder}: {architecture}, no chat template", "chat requests will be refused")
    return ok("model", f"{folder}: {architecture}")


def _unknown(architecture: str) -> Exception | None:
    """What the engine has against an architecture; nothing where no engine is installed."""
    config = _engine("config")
    unknown: Exception | None = config and config.unknown_architecture(architecture)
    return unknown


def _broken(folder: Path) -> Exception | None:
    """What is wrong with the weights; nothing where no engine is installed."""
    weights, errors = _engine("whole_weights"), _engine("errors")
    if weights is None or errors is None:
        return None
    try:
        weights.check_whole(folder)
    except errors.ModelError as error:
        found: Exception = error
        return found
    return None


def _engine(module: str) -> Any:  # noqa: ANN401  # a module, or None
    """Return a module of the engine, which a client does without."""
    try:
        return importlib.import_module(f"kvferry_engine.{module}")
    except ImportError:
        return None


def _default() -> Finding:
    """The default model, which is made when it is first needed."""
    engine = _engine("default_model")
    if engine is None:
        return warn("model", "the default model needs the engine", "pip install 'kvferry[worker]', or give --model")
    folder = engine.models_folder() / engine.NAME
    if engine.is_whole(folder):
        return ok("model", f"{folder}: the default model")
    return ok("model", "the default model, prepared on first use (kvferry model does it now)")


def _lacking_weights(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return [] if list(folder.glob("*.safetensors")) else ["model.safetensors"]
    try:
        names = sorted(set(orjson.loads(index.read_bytes())["weight_map"].values()))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return [f"a readable {INDEX}"]
    return [name for name in names if not (folder / name).is_file()]


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return "chat_template" in orjson.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
