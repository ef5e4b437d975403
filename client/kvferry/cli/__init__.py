"""The `kvferry` command."""

import sys

HINT = 'The kvferry command needs more packages: pip install "kvferry[cli]"'
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def main() -> None:
    """Run the command line; without the packages of the extra `cli`, say in one line how to get them."""
    try:
        _check_extra()
        from kvferry.cli.root import root  # noqa: PLC0415

        root()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _check_extra() -> None:
    try:
        import click  # noqa: F401, PLC0415
        import rich  # noqa: F401, PLC0415
    except ImportError:
        sys.exit(HINT)
