"""The fabric beside NIXL and Mooncake on the same scattered pages: one line of JSON a case, medians of turns."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Self

from kvferry_fabric import providers

ROOT = Path(__file__).parents[1]
SYSTEMS = ("ours-tcp", "ours-local", "nixl-tcp", "nixl-cma", "mooncake-tcp")
ALSO = ("ours-net", "ours-shm")
QUIET = {"NIXL_LOG_LEVEL": "WARN", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3", "UCX_WARN_UNUSED_ENV_VARS": "n"}
SETTINGS = {
    "nixl-tcp": {"UCX_TLS": "tcp"},
    "nixl-cma": {"UCX_TLS": "cma,tcp"},
    "mooncake-tcp": {"MC_TCP_ENABLE_CONNECTION_POOL": "1"},
}
BATCH, WINDOW, LEAST_BATCHES = 256, 4, 8


class LeftOutError(RuntimeError):
    """A system that does not work here; the text says why, in one line."""


def interpreter(system: str) -> str:
    """Where a system is installed."""
    if system.startswith("ours-"):
        name = system.removeprefix("ours-")
        if name not in providers():
            raise LeftOutError(f"this machine or version has no provider {name}")
        return sys.executable
    python = ROOT / ".venv-peers/bin/python"
    if not python.exists():
        raise LeftOutError("not installed: scripts/setup_peers.sh makes .venv-peers")
    return str(python)


class Pair:
    """pair.py, running: bytes have been checked once it is there."""

    def __init__(self, system: str, page: int, pages: int) -> None:
        self.system = system
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        words = [interpreter(system), "-m", "peers.pair", system, *(str(n) for n in (page, pages, BATCH, WINDOW))]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            cwd=Path(__file__).parent, env=os.environ | QUIET | SETTINGS.get(system, {}),
        )  # fmt: skip

    def ready(self) -> None:
        """Wait until its bytes are checked. Raises LeftOutError with the last line that it wrote."""
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return dict(json.loads(line))
        status = self.process.wait()
        self.log.seek(0)
        said = self.log.read().strip().splitlines() or ["nothing"]
        raise LeftOutError(f"ended with status {status} and said: {said[-1]}")

    def round(self) -> float:
        """Seconds of one round."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._answer()["seconds"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def leave_out(system: str, why: LeftOutError) -> None:
    print(f"bench_peers: {system} is left out: {why}", file=sys.stderr, flush=True)


def opened(stack: ExitStack, system: str, page: int, pages: int) -> Pair | None:
    """A pair whose bytes have been checked; None, and one line on stderr, if there is none to be had."""
    try:
        pair = stack.enter_context(Pair(system, page, pages))
        pair.ready()
    except LeftOutError as why:
        leave_out(system, why)
        return None
    return pair


def timed(pair: Pair) -> float | None:
    """Seconds of a round; None, and one line on stderr, if the pair has ended."""
    try:
        return pair.round()
    except LeftOutError as why:
        leave_out(pair.system, why)
        return None


def measure(systems: list[str], page: int, size: int, rounds: int) -> Iterator[dict[str, Any]]:
    """One page size: every system is set up and checked, then each has a round in turn; the first one warms up."""
    pages = max(LEAST_BATCHES, size // page // BATCH) * BATCH
    times: dict[str, list[float]] = {system: [] for system in systems}
    with ExitStack() as stack:
        pairs = [pair for system in systems if (pair := opened(stack, system, page, pages))]
        for turn in range(rounds + 1):
            taken = [(pair, timed(pair)) for pair in pairs]
            pairs = [pair for pair, seconds in taken if seconds is not None]
            for pair, seconds in taken if turn else []:
                times[pair.system] += [seconds] if seconds is not None else []
    for system, seconds_of in times.items():
        if seconds_of:
            yield result(system, page, pages * page, seconds_of)


def result(system: str, page: int, size: int, seconds: list[float]) -> dict[str, Any]:
    return {
        "bench": "peers",
        "system": system,
        "page_bytes": page,
        "gbps": round(size / median(seconds) / 1e9, 3),
        "best_gbps": round(size / min(seconds) / 1e9, 3),
        "verified_bytes": size,
        "rounds": len(seconds),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    known = (*SYSTEMS, *ALSO)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(known)}")
    parser.add_argument("--sizes", default="4096,16384,65536,262144", help="page sizes in bytes")
    parser.add_argument("--mib", type=int, default=256, help="memory that a round moves, about")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each system, in turns")
    options = parser.parse_args()
    if unknown := set(options.systems.split(",")) - set(known):
        parser.error(f"no such system: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = arguments()
    for size in options.sizes.split(","):
        for result in measure(options.systems.split(","), int(size), options.mib << 20, options.rounds):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
