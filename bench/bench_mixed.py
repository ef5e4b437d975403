"""Disaggregated against mixed on the same two cores: streams decode while long prompts arrive; JSON lines, a plot."""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from mixed_bench.arrivals import Arrival, generated, recorded, scaled
from mixed_bench.cluster import cluster
from mixed_bench.load import Seen, apply

SYSTEMS = {"mixed": "mixed", "disaggregated": "disaggregated", "decoder-alone": "disaggregated"}
"""System -> shape of its cluster."""
WARM_SECONDS = 5.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="JSON lines of timestamp (ms), input_length; else arrivals are made")
    parser.add_argument("--every", type=int, default=8, help="take one arrival of so many")
    parser.add_argument("--shrink", type=float, default=32, help="divide prompt lengths by this")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a prompt at most, after that")
    parser.add_argument("--seconds", type=float, default=60, help="how long the load lasts, for each system")
    parser.add_argument("--streams", type=int, default=8, help="streams that decode all the time")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each system, in turns")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals that are made")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which")
    parser.add_argument("--plot", type=Path, help="file for the picture")
    parser.add_argument("up", nargs="*", help="further flags for `kvferry up`, after --")
    return parser.parse_args()


def arrivals(options: argparse.Namespace) -> list[Arrival]:
    source = recorded(options.trace) if options.trace else generated(options.seed)
    return scaled(source, every=options.every, shrink=options.shrink, longest=options.longest, seconds=options.seconds)


def measure(system: str, options: argparse.Namespace, folder: Path) -> Seen:
    long = [] if system == "decoder-alone" else arrivals(options)
    with cluster(SYSTEMS[system], folder, options.up) as endpoint:
        asyncio.run(apply(endpoint, streams=options.streams, arrivals=[], seconds=WARM_SECONDS))
        return asyncio.run(apply(endpoint, streams=options.streams, arrivals=long, seconds=options.seconds))


def line(system: str, seen: Seen) -> str:
    def percentile(values: list[float], percent: int) -> float:
        return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)

    figures = {
        f"{name}_p{percent}_ms": percentile(values, percent)
        for name, values in (("itl", seen.itl), ("ttft", seen.ttft))
        for percent in (50, 99)
    }
    return json.dumps({"bench": "mixed", "system": system, **figures, "tokens": len(seen.itl), "asked": len(seen.ttft)})


def main() -> None:
    options = arguments()
    seen = {name: Seen() for name in options.systems.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for system, sum_of in seen.items():
                round_of = measure(system, options, Path(folder))
                sum_of.itl += round_of.itl
                sum_of.ttft += round_of.ttft
    for system, all_of in seen.items():
        print(line(system, all_of), flush=True)
    if options.plot:
        from mixed_bench.picture import draw  # noqa: PLC0415 - matplotlib is asked for by those alone who want a plot

        draw(options.plot, {name: each.itl for name, each in seen.items()})


if __name__ == "__main__":
    main()
