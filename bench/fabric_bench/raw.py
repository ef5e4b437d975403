"""fabric_limit.c and memcpy_limit.c, built and running: the raw limits that the fabric is held against."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kvferry_fabric.native import LIBFABRIC_SETTINGS

SOURCES = {"fabric_limit": ("-lfabric",), "memcpy_limit": ()}
LIBFABRIC_NAMES = {"tcp": "tcp;ofi_rxm", "verbs": "verbs;ofi_rxm"}


def build(folder: Path) -> Path:
    """Compile both programs into `folder`; return fabric_limit, which memcpy_limit lies beside."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or "cc"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    for name, libraries in SOURCES.items():
        source = Path(__file__).parents[1] / f"{name}.c"
        subprocess.run([compiler, *flags, "-o", str(folder / name), str(source), *libraries], check=True)
    return folder / "fabric_limit"


class Limit:
    """One run of a program; it has checked its bytes when the constructor returns."""

    def __init__(self, command: list[str]) -> None:
        environment = {**LIBFABRIC_SETTINGS, **os.environ}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            msg = f"{' '.join(map(str, self.process.args))} ended with status {self.process.wait()}"  # type: ignore[arg-type]
            raise RuntimeError(msg)
        return dict(json.loads(line))

    def round(self) -> dict[str, Any]:
        """Run one timed round and return its numbers."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._line()

    def close(self) -> None:
        """End the program."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait(20)


class Raw(Limit):
    """Plain libfabric."""

    def __init__(
        self, program: Path, provider: str, mode: str, *, page: int, pages: int, depth: int, pause_us: int = 0
    ) -> None:
        """Write `pages` pages of so many bytes a round, one in a write, with `depth` writes in flight."""
        name = LIBFABRIC_NAMES.get(provider, provider)
        super().__init__([str(program), name, mode, *(str(number) for number in (page, pages, depth, 1, pause_us))])


class Copy(Limit):
    """Plain memcpy, for peers on one host."""

    def __init__(self, program: Path, *, page: int, pages: int) -> None:
        """Copy `pages` scattered pages of so many bytes a round; `program` is what build() gave."""
        super().__init__([str(program.with_name("memcpy_limit")), str(page), str(pages)])
