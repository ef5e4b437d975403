"""A picture of the results: what share of inter-token latencies is below how many milliseconds."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot


def draw(path: Path, latencies: dict[str, list[float]]) -> None:
    """Write the distribution of each system's inter-token latency, ms."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, values in latencies.items():
        axes.ecdf(values, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("inter-token latency, ms")
    axes.set_ylabel("share of tokens")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
