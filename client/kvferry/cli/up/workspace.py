"""The temporary folder of one `kvferry up`, and the removal of folders whose owner was killed."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "kvferry-up-"
LOCK = "lock"


@contextmanager
def workspace(parent: Path | None = None) -> Iterator[Path]:
    """Make a private folder that goes away at the end; a lock in it tells others that its owner lives."""
    parent = parent or Path(tempfile.gettempdir())
    sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with (folder / f"{LOCK}.new").open("w") as lock:
            # Locked before it has its name: a lock that can be seen is held, or its owner is dead.
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f"{LOCK}.new").rename(folder / LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove the folders that nobody holds any more."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with lock.open("r") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # Somebody's, and alive, or not ours to touch.
