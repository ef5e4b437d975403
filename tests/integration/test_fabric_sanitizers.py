"""The C code under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer; no warnings."""

import os
import subprocess
from pathlib import Path

import pytest
from c_programs import compiler
from kvferry_fabric.native import LIBFABRIC_SETTINGS

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "fabric" / "csrc"
ENGINE = ROOT / "engine" / "csrc"
TESTS = ROOT / "tests" / "csrc"
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
PROGRAMS = [
    ("test_slots", ()),
    ("test_transfer", ()),
    ("test_health", ()),
    ("test_pace", ()),
    ("test_board", ()),
    *(("test_team", (threads,)) for threads in ("2", "5")),
    ("fuzz_schedule", ("1", "100000")),
    *(("test_engine", (name,)) for name in ("tcp", "net", "shm", "local")),
    ("test_engine", ("tcp", "unordered")),
    ("test_engine", ("tcp", "3:2")),
]

pytestmark = pytest.mark.sanitizer


@pytest.fixture(scope="module", params=sorted(SANITIZERS))
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A folder with the test programs, built under one sanitizer."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = [
        "-std=gnu11",
        "-g",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fno-omit-frame-pointer",
        f"-I{CSRC}",
        f"-I{TESTS}",
        f"-I{ENGINE}",
    ]
    flags += [f"-fsanitize={SANITIZERS[request.param]}", "-fno-sanitize-recover=all", "-pthread"]
    compiler([*flags, "-c", *map(str, sorted(CSRC.glob("*.c")))], folder)
    objects = [str(path) for path in sorted(folder.glob("*.o"))]
    for name in sorted({name for name, _ in PROGRAMS}):
        compiler([*flags, "-o", name, str(TESTS / f"{name}.c"), *objects, "-lfabric"], folder)
    return request.param, folder


@pytest.mark.parametrize(("name", "arguments"), PROGRAMS, ids=["-".join((n, *a)) for n, a in PROGRAMS])
def test_c_program_is_clean(programs: tuple[str, Path], name: str, arguments: tuple[str, ...]) -> None:
    _, folder = programs
    environment = {
        **os.environ,
        **LIBFABRIC_SETTINGS,
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "LSAN_OPTIONS": f"suppressions={TESTS / 'lsan.supp'}:print_suppressions=0",
        "TSAN_OPTIONS": f"suppressions={TESTS / 'tsan.supp'}:halt_on_error=1:ignore_noninstrumented_modules=1",
    }
    done = subprocess.run(
        [str(folder / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
