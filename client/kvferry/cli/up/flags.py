"""How whoever started `kvferry up` gives it a flag."""

import os


def flag(name: str) -> str:
    """Name a flag for an error's advice; `make serve` hands on what stands in ARGS."""
    return f'ARGS="{name} ..."' if os.environ.get("MAKELEVEL") else name
