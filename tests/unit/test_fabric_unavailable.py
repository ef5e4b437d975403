"""Without the C extension the package imports, and opening an engine says what to install."""

import os
import subprocess
import sys
from pathlib import Path

import kvferry_fabric
import pytest
from kvferry_fabric import FabricError, FabricUnavailableError, TransferEngine, providers
from kvferry_fabric.providers import choose


def test_a_missing_extension_is_named_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvferry_fabric._fabric", None)
    monkeypatch.delattr(kvferry_fabric, "_fabric", raising=False)
    with pytest.raises(FabricUnavailableError, match="apt install gcc libfabric-dev"):
        TransferEngine("tcp", incarnation=1)


def test_auto_takes_the_best_provider_present() -> None:
    present = providers()
    assert choose("auto") == next(name for name in ("efa", "verbs", "tcp") if name in present)


def test_an_unknown_provider_is_named() -> None:
    with pytest.raises(FabricUnavailableError, match="'infiniband' is not one of auto, efa"):
        TransferEngine("infiniband", incarnation=1)


def test_an_address_that_is_not_of_this_host_is_named() -> None:
    with pytest.raises(FabricError, match=r"192\.0\.2\.1"):
        TransferEngine("tcp", incarnation=1, bind="192.0.2.1")


def test_a_build_without_a_compiler_succeeds_without_the_extension(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    folders = [f"--build-temp={tmp_path}", f"--build-lib={tmp_path}"]
    command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
    environment = {**os.environ, "CC": "/no/compiler/here"}
    built = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    assert "kvferry_fabric._fabric" in built.stderr
    assert not list(tmp_path.rglob("*.so"))
