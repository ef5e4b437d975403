"""The comparison with other transfer systems runs, and goes on without those that are not there."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "bench_peers.py"


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCH), "--mib", "1", "--rounds", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_system_that_is_not_there_is_named_and_the_rest_goes_on(tmp_path) -> None:
    copy = tmp_path / "bench"  # beside which there is no .venv-peers
    copy.mkdir()
    for name in ("bench_peers.py", "peers"):
        (copy / name).symlink_to(BENCH.parent / name)
    command = [sys.executable, "bench_peers.py", "--mib", "1", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--systems", "ours-tcp,nixl-tcp", "--sizes", "1024"],
        cwd=copy, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["bench"], row["system"], row["page_bytes"]) for row in rows] == [("peers", "ours-tcp", 1024)]
    assert rows[0]["gbps"] > 0
    assert done.stderr.splitlines() == [
        "bench_peers: nixl-tcp is left out: not installed: scripts/setup_peers.sh makes .venv-peers"
    ]


def test_an_unknown_system_is_refused() -> None:
    done = bench("--systems", "carrier-pigeon")
    assert done.returncode == 2
    assert "no such system: carrier-pigeon" in done.stderr
