"""The `kvferry` command."""

import sys

HINT = 'The kvferry command needs more packages: pip install "kvferry[cli]"'


def main() -> None:
    """Run the command line; without the packages of the extra `cli`, say in one line how to get them."""
    try:
        import click  # noqa: F401, PLC0415
        import rich  # noqa: F401, PLC0415
    except ImportError:
        sys.exit(HINT)
    from kvferry.cli.root import root  # noqa: PLC0415

    root()
