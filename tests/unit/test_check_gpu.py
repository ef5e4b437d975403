"""scripts/check_gpu.py where there is no GPU, and what its steps compare."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def check_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("check_gpu")


def test_without_a_gpu_it_says_so_and_ends_with_2(check_gpu, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py"])
    assert check_gpu.main() == 2
    assert capsys.readouterr().out.startswith("no GPU to check: --device cuda: GPU 0 is needed")


def test_every_step_is_there_and_says_how_it_went(check_gpu, monkeypatch) -> None:
    from gpu_checks import Skip, must

    def skip() -> str:
        msg = "not here"
        raise Skip(msg)

    for step in check_gpu.STEPS:
        module = importlib.import_module(f"gpu_checks.{step}")
        monkeypatch.setattr(module, "run", lambda: "fine")
        assert check_gpu.in_this_process(step) == {"status": "PASS", "detail": "fine"}
        monkeypatch.setattr(module, "run", skip)
        assert check_gpu.in_this_process(step) == {"status": "SKIP", "detail": "not here"}
        monkeypatch.setattr(module, "run", lambda: must(condition=False, what="bytes differ"))
        assert check_gpu.in_this_process(step) == {"status": "FAIL", "detail": "AssertionError: bytes differ"}


def test_an_unknown_step_is_refused(check_gpu, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--steps", "tokens,luck"])
    with pytest.raises(SystemExit):
        check_gpu.main()
    assert "no such step: luck" in capsys.readouterr().err


def test_tokens_may_differ_only_where_two_are_as_good(check_gpu) -> None:
    from gpu_checks.tokens import equal_tokens

    right = [(5, 1.0), (6, 1e-5), (7, 1.0)]
    assert equal_tokens(right, right, "") == 3
    assert equal_tokens(right, [(5, 1.0), (8, 1e-5), (9, 1.0)], "") == 1
    with pytest.raises(AssertionError, match="prompt 2 differs at token 0: 5 and 4"):
        equal_tokens(right, [(4, 1.0), (6, 1.0), (7, 1.0)], "prompt 2")


def test_pages_are_compared_between_two_processes(check_gpu) -> None:
    from gpu_checks import transfer

    assert transfer.over(transfer.Way("tcp", "cpu", in_gpu=False)).startswith("512 pages of 65536 bytes over tcp")
