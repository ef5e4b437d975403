#!/usr/bin/env python3
"""Checks all of the CUDA side on a machine with a GPU in one run, in under 8 minutes.

    .venv/bin/python scripts/check_gpu.py [--steps tokens,memory] [--seconds 480]

Each step runs in a process of its own, so that one that breaks CUDA leaves the others whole. It prints a line for each,
PASS, FAIL or SKIP with the reason, and a JSON summary at the end. Status 0: nothing failed; 1: something did; 2: there
is no GPU. What each step settles: docs/hardware.md.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from gpu_checks import Skip
from kvferry_engine.devices import resolve
from kvferry_node.errors import SettingsError

STEPS = ("device", "tokens", "memory", "counter", "transfer", "flashinfer", "graphs", "speed")
ROW = "{:9} {:5} {:6.1f} s  {}"


def in_this_process(step: str) -> dict[str, str]:
    """Run one step; how it went."""
    try:
        return {"status": "PASS", "detail": importlib.import_module(f"gpu_checks.{step}").run()}
    except Skip as reason:
        return {"status": "SKIP", "detail": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        traceback.print_exc()
        return {
            "status": "FAIL",
            "detail": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        }


def in_its_own(step: str, seconds: float) -> dict[str, str]:
    """Run one step in a process of its own, at most so long."""
    command = [sys.executable, __file__, "--step", step]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=max(1.0, seconds), check=False)
    except subprocess.TimeoutExpired:
        return {"status": "FAIL", "detail": f"not done within {seconds:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"status": "FAIL", "detail": f"its process ended with status {done.returncode}"}
    return dict(json.loads(lines[-1]))


def check(steps: list[str], seconds: float) -> int:
    until = time.monotonic() + seconds
    results: dict[str, dict[str, str | float]] = {}
    for step in steps:
        began = time.monotonic()
        result = in_its_own(step, until - began)
        took = time.monotonic() - began
        results[step] = {**result, "seconds": round(took, 1)}
        print(ROW.format(step, result["status"], took, result["detail"]), flush=True)
    failed = any(result["status"] == "FAIL" for result in results.values())
    gpu = torch.cuda.get_device_name(0)
    print(json.dumps({"check": "gpu", "gpu": gpu, "torch": torch.__version__, "failed": failed, "steps": results}))
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(STEPS), help="which, with commas between them")
    parser.add_argument("--seconds", type=float, default=480, help="how long all of them may take")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(in_this_process(options.step)))
        return 0
    steps = options.steps.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    try:
        resolve("cuda")
    except SettingsError as why:
        print(f"no GPU to check: {why}")
        return 2
    return check(steps, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
