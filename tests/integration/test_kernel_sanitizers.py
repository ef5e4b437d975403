"""The kernels in C under sanitizers, at odd sizes and at the edges of pages that they must not touch."""

import os
import platform
import subprocess
from pathlib import Path

import pytest
from c_programs import compiler

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "engine" / "csrc"
TESTS = ROOT / "tests" / "csrc"
NO_AVX2 = 77
FLAGS = [
    *("-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fopenmp", f"-I{CSRC}", f"-I{TESTS}"),
    # Those of the undefined ones that can be wrong in loops over vectors; all of them take twice as long to compile.
    *("-fsanitize=address,bounds,signed-integer-overflow,shift", "-fno-sanitize-recover=all"),
]

pytestmark = [
    pytest.mark.sanitizer,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="there are no kernels for this processor"),
]


def test_kernels_touch_nothing_beside_their_operands(tmp_path: Path) -> None:
    sources = [*sorted(CSRC.glob("*.c")), TESTS / "test_kernels.c"]
    compiler([*FLAGS, "-o", "kernels", *map(str, sources), "-lm"], tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [str(tmp_path / "kernels")], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == NO_AVX2:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
