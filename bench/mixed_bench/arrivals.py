"""When long prompts arrive and how long they are: from a recorded trace, or made in the shape of one."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The shape of an hour of a public chat service's arrivals (Mooncake's conversation trace): requests come in ticks of
# three seconds, about ten a tick; prompt lengths are lognormal within bounds, a median of 6,900 tokens.
TICK_SECONDS = 3.0
PER_TICK = 10.2
LOG_MEAN, LOG_DEVIATION = 8.737, 1.199
SHORTEST, LONGEST = 891, 126_195


class Arrival(NamedTuple):
    """One long prompt."""

    at: float
    """Seconds from the start."""
    tokens: int


def generated(seed: int) -> Iterator[Arrival]:
    """Arrivals in the trace's shape, without end."""
    draw = random.Random(seed)
    at = 0.0
    while True:
        at += draw.expovariate(PER_TICK / TICK_SECONDS)
        tokens = draw.lognormvariate(LOG_MEAN, LOG_DEVIATION)
        yield Arrival(at // TICK_SECONDS * TICK_SECONDS, int(min(max(tokens, SHORTEST), LONGEST)))


def recorded(path: Path) -> Iterator[Arrival]:
    """Arrivals of a trace: JSON lines with `timestamp` in milliseconds and `input_length` in tokens."""
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            yield Arrival(entry["timestamp"] / 1000, entry["input_length"])


def scaled(arrivals: Iterator[Arrival], *, every: int, shrink: float, longest: int, seconds: float) -> list[Arrival]:
    """Fit arrivals to a small machine: one of `every`, lengths divided by `shrink` and cut at `longest`."""
    taken = []
    for number, arrival in enumerate(arrivals):
        if arrival.at >= seconds:
            break
        if number % every == 0:
            taken.append(Arrival(arrival.at, min(longest, max(2, int(arrival.tokens / shrink)))))
    return taken
