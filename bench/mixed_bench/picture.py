"""A picture of the results: what share of inter-token latencies is above how many milliseconds."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FormatStrFormatter

RAREST = 1e-3
"""Share of tokens that the picture ends at: with some thousand of them, fewer say nothing."""


def draw(path: Path, latencies: dict[str, list[float]]) -> None:
    """Write the distribution of each system's inter-token latency, ms; the tail is what disaggregation is for."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, values in latencies.items():
        axes.ecdf(values, complementary=True, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(RAREST, 1)
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(FormatStrFormatter("%g"))
    axes.axhline(0.01, color="grey", linestyle=":", label="p99")
    axes.set_xlabel("inter-token latency, ms")
    axes.set_ylabel("share of tokens that took longer")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
