"""scripts/check_fabric.py: a table, and a status that says whether all is well."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_fabric.py"


def test_bytes_are_verified_and_a_missing_provider_is_told() -> None:
    command = [sys.executable, str(SCRIPT), "--mib", "1", "--rounds", "1", "--providers", "tcp,carrier-pigeon"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [(row[0], row[1]) for row in rows[1:]] == [("tcp", "ok,"), ("tcp", "ok,"), ("carrier-pigeon", "MISSING")]
    assert done.returncode == 1, done.stderr
