"""A brake on a node's forward passes: what a test wants to see in the midst of its way stays there as long as it likes.

A file beside the node's log: while it is there, passes are held up in the forward thread. The event loop goes on: the
node hears, answers and renews its lease as ever.
"""

import collections
import contextlib
import itertools
import time
from pathlib import Path
from typing import NamedTuple

_POLL_SECONDS = 0.005
_numbers = itertools.count()


class Order(NamedTuple):
    """What is in the file."""

    number: int
    """Tells one order from the next."""
    seconds: float
    """How long each pass is held up."""
    free: int
    """How many passes go through before."""


@contextlib.contextmanager
def braked(paths, seconds, free):
    """Put the brakes on, for as long as the block runs."""
    number = next(_numbers)
    for path in paths:
        whole = path.with_suffix(".new")
        whole.write_text(f"{number} {seconds} {free}")
        whole.rename(path)
    try:
        yield
    finally:
        for path in paths:
            path.unlink()


def install(path):
    """Have the forward passes of this process heed the brake at `path`."""
    from kvferry_engine.worker import Worker

    compute, passes = Worker.compute, collections.Counter()

    def hold():
        order, began = _read(path), time.monotonic()
        passes[order] += 1
        while order is not None and passes[order] > order.free and time.monotonic() - began < order.seconds:
            time.sleep(_POLL_SECONDS)
            if _read(path) != order:
                return

    def held(work):
        hold()
        return work()

    Worker.compute = lambda worker, work: compute(worker, lambda: held(work))


def _read(path):
    try:
        number, seconds, free = Path(path).read_text().split()
    except FileNotFoundError:
        return None
    return Order(int(number), float(seconds), int(free))
