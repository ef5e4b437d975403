"""`kvferry doctor --topology`: who uses which NIC and which core, as the installed packages tell."""

import importlib
from importlib.metadata import entry_points
from pathlib import Path

import click
import msgspec

from kvferry.cli.doctor.fabric import GROUP

FUNCTION = "topology"
"""A module that an entry point of GROUP names may have this function too: file or None -> drawing and plan."""


class Drawn(msgspec.Struct, frozen=True):
    """A topology, twice."""

    drawing: str
    plan: dict[str, object]


def topology(file: Path | None) -> Drawn:
    """Return this machine's topology, or that of a file which lstopo wrote.

    Raises click.ClickException with what to do if no installed package can tell, or if it can't be read.
    """
    reasons = []
    for module in _modules():
        try:
            function = getattr(importlib.import_module(module), FUNCTION, None)
            if function is not None:
                return msgspec.convert(function(file), Drawn)
        except (ImportError, OSError) as error:
            reasons.append(f"; {module} can't be loaded: {error}")
        except RuntimeError as error:  # what a check raises if it can't be made
            raise click.ClickException(str(error)) from error
    msg = f'Nothing installed can read the topology: pip install "kvferry[worker]"{"".join(reasons)}'
    raise click.ClickException(msg)


def _modules() -> list[str]:
    return [entry.module for entry in entry_points(group=GROUP)]
