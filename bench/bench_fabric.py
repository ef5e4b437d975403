"""The fabric against plain libfabric on this machine: one line of JSON a case, medians of rounds taken in turns."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fabric_bench import bulk, latency, stream
from fabric_bench.raw import build
from kvferry_fabric import providers

PARTS = ("stream", "ping", "post", "small", "bulk")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--providers", default="tcp,net,shm,local", help="which providers, of those that are present")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which measurements: {','.join(PARTS)}")
    parser.add_argument("--case", default="", help='throughput cases whose name has this in it, as "4096-scattered"')
    parser.add_argument("--mib", type=int, default=256, help="memory that a round of a throughput case moves")
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="rounds of each side, in turns; streams make as many as share out evenly over their connections",
    )
    return parser.parse_args()


def results(options: argparse.Namespace, program: Path) -> Iterator[dict[str, Any]]:
    """Every measurement that was asked for, as it is done."""
    present = [name for name in options.providers.split(",") if name in providers()]
    size, rounds, wanted = options.mib << 20, options.rounds, options.parts.split(",")
    if "stream" in wanted:
        for provider in present:
            yield from stream.measure_all(stream.Setting(program, provider, size, rounds), options.case)
    singles: list[tuple[str, Callable[[str], dict[str, Any]]]] = [
        ("ping", lambda name: latency.measure_ping(program, name, rounds)),
        ("ping", lambda name: latency.measure_ping(program, name, rounds, pause=0.001)),
        ("post", lambda name: latency.measure_posting(name, 0.0002)),
        ("post", lambda name: latency.measure_posting(name, 0.002)),
        ("small", lambda name: latency.measure_fairness(name, size)),
        ("bulk", bulk.measure_registration),
        ("bulk", lambda name: bulk.measure_fragmentation(name, 0.5)),
        ("bulk", lambda name: bulk.measure_fragmentation(name, 0.9)),
    ]
    for part, measure in singles:
        for provider in present[:1]:
            if part in wanted:
                yield measure(provider)


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for result in results(options, program):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
