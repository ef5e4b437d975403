"""Test programs in C."""

import subprocess
from pathlib import Path

import pytest

INSTALL = "apt install gcc libgcc-12-dev libfabric-dev (gcc with its sanitizers, libfabric's headers)"


def compiler(arguments: list[str], folder: Path) -> None:
    """Run gcc in `folder`; the test fails, and says what is missing, if it does."""
    try:
        done = subprocess.run(["gcc", *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    except FileNotFoundError:
        pytest.fail(f"no C compiler: {INSTALL}")
    if done.returncode:
        pytest.fail(f"does not compile or link; if headers or a sanitizer are missing: {INSTALL}\n{done.stderr}")
