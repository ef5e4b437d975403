"""The load: streams that decode all the time, and long prompts that arrive beside them."""

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field

from kvferry import AsyncClient

from mixed_bench.arrivals import Arrival

STREAM_PROMPT = 24
"""Tokens: short enough that the decoder prefills them by itself in every shape."""
STREAM_TOKENS = 96
LONG_TOKENS = 4
"""Answer tokens of a long prompt."""


@dataclass
class Seen:
    """What clients saw, in milliseconds."""

    itl: list[float] = field(default_factory=list)
    """Between two tokens of a stream."""
    ttft: list[float] = field(default_factory=list)
    """Of long prompts; of the streams themselves where there are none."""


async def apply(endpoint: str, *, streams: int, arrivals: list[Arrival], seconds: float) -> Seen:
    """Run the load for `seconds`, then let what is under way end."""
    seen, stream_ttft = Seen(), list[float]()
    async with AsyncClient(endpoint, timeout=600) as client:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(_stream(client, number, until, seen, stream_ttft))
            for number, arrival in enumerate(arrivals):
                group.create_task(_long(client, number, arrival, seen))
    if not arrivals:
        seen.ttft = stream_ttft
    return seen


async def _stream(client: AsyncClient, number: int, until: float, seen: Seen, ttft: list[float]) -> None:
    draw = random.Random(number)
    while time.monotonic() < until:
        times = await _times(client, _prompt(draw, STREAM_PROMPT), STREAM_TOKENS)
        ttft.append((times[1] - times[0]) * 1e3)
        seen.itl += [(after - before) * 1e3 for before, after in itertools.pairwise(times[1:])]


async def _long(client: AsyncClient, number: int, arrival: Arrival, seen: Seen) -> None:
    await asyncio.sleep(arrival.at)
    times = await _times(client, _prompt(random.Random(-1 - number), arrival.tokens), LONG_TOKENS)
    seen.ttft.append((times[1] - times[0]) * 1e3)


async def _times(client: AsyncClient, prompt: list[int], tokens: int) -> list[float]:
    """When the request was sent, and when each piece of the answer came; a piece is a token."""
    times = [time.monotonic()]
    options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with await client.stream(prompt_ids=prompt, **options) as stream:
        times.extend([time.monotonic() async for _ in stream])
    return times


def _prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(100, 40_000) for _ in range(tokens)]
