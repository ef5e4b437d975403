#!/usr/bin/env python3
"""Checks the fabric on a new machine in one run: which providers there are, bytes over each, then speed.

    .venv/bin/python scripts/check_fabric.py [--providers efa,tcp] [--mib 64] [--rounds 3]

Over every provider it moves scattered pages to another process and compares every byte, and only then times them, in
turns with plain libfabric. It prints a table, and ends with status 1 if bytes were wrong, a provider that was asked for
is missing or failed, or there is none.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from fabric_bench import stream
from fabric_bench.raw import build
from kvferry_fabric import PROVIDERS, FabricError, providers

CASES = [stream.Case(4 << 10, "scattered", vectors=True), stream.Case(64 << 10, "scattered", vectors=False)]
BESIDE_LIBFABRIC = {"local"}
"""There is no plain libfabric to hold it against."""
ROW = "{:8} {:12} {:>10} {:>10} {:>10} {:>7}"


def check(setting: stream.Setting) -> bool:
    """Print a row for each case. Returns whether all went well."""
    try:
        receiver = stream.Receiver(setting.provider, setting.size)
        try:
            for case in CASES:
                row = stream.measure(setting, receiver, case)
                numbers = (row[name] for name in ("ours_gbps", "raw_gbps", "ratio"))
                print(ROW.format(setting.provider, "ok, verified", case.page, *numbers), flush=True)
        finally:
            receiver.close()
    except (FabricError, RuntimeError, OSError) as error:
        print(ROW.format(setting.provider, "FAILED", "", "", "", ""), str(error).splitlines()[0])
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", default="", help="these must be there; else whatever is there is checked")
    parser.add_argument("--mib", type=int, default=64, help="memory that a round moves")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each side, in turns")
    options = parser.parse_args()
    present = [name for name in providers() if name not in BESIDE_LIBFABRIC]
    wanted = options.providers.split(",") if options.providers else present
    print(ROW.format("provider", "bytes", "page", "GB/s", "limit", "ratio"))
    good = bool(wanted)
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for name in [name for name in PROVIDERS if name in {*wanted, *present}]:
            if name in wanted and name in present:
                good &= check(stream.Setting(program, name, options.mib << 20, options.rounds))
    for name in [name for name in wanted if name not in present]:
        print(ROW.format(name, "MISSING", "", "", "", ""))
        good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
