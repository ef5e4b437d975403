"""The folder that a cluster's logs are written to: where it is, and that it has one owner at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvferry.cli.up.flags import flag

LOCK = ".lock"


def default_log_dir(port: int) -> Path:
    """Logs stay after the end, so they do not belong into a temporary folder; one folder per port, made anew."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvferry" / "logs" / str(port)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Make the folder, and hold it for as long as its logs are written.

    Raises ClickException if it can't be made, or if another `kvferry up` writes to it: two that start at once on one
    port both find that free, and whoever loses it must not begin the other's logs anew.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        msg = f"--log-dir: {folder} can't be made: {error.strerror}"
        raise click.ClickException(msg) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"another kvferry up writes its logs to {folder}: choose another with {flag('--port')} or --log-dir"
            raise click.ClickException(msg) from error
        except OSError:
            pass  # a file system without locks, as some network ones are: no reason not to start
        yield
