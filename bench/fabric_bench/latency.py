"""Small things: one signalled page, the way from a layer counter to the wire, a small transfer beside a large one."""

import os
import sys
import threading
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from kvferry_fabric import ChunkSchedule, EventKind, Transfer, TransferEngine, runs

from fabric_bench.raw import Raw
from fabric_bench.receiver import SLOT, Receiver, keep_to_core, random_memory, wait_events

PAGE = 64 << 10
PINGS = 512
"""A power of two: also the number of pages of the plain ping."""


class Sender:
    """An engine in this process with random memory, connected to a receiver."""

    def __init__(self, receiver: Receiver, size: int, **options: Any) -> None:  # noqa: ANN401 - of TransferEngine
        self.receiver = receiver
        self.engine = TransferEngine(receiver.descriptor.provider, incarnation=1, **options)
        self.region = self.engine.register(memoryview(random_memory(size)))
        self.peer = self.engine.connect(receiver.descriptor.addresses)

    def write(self, generation: int, slot: int = SLOT, length: int = PAGE) -> Transfer:
        return self.engine.write(
            peer=self.peer, region=self.region, source_offset=0, remote=self.receiver.descriptor,
            destination_offset=0, length=length, slot=slot, generation=generation,
        )  # fmt: skip

    def chunk(self, table: np.ndarray, page: int, **changes: Any) -> ChunkSchedule:  # noqa: ANN401 - its fields
        fields = {
            "counter": None, "first_value": 0, "layers": 1, "region": self.region, "peer": self.peer, "slot": 0,
            "remote": self.receiver.descriptor, "generation": 0, "source_layer_stride": 0, "runs": table,
            "destination_layer_stride": 0, "source_page_stride": page, "destination_page_stride": page, "length": page,
        }  # fmt: skip
        return ChunkSchedule(**{**fields, **changes})

    def done(self) -> Any:  # noqa: ANN401 - the event
        event = wait_events(self.engine)[0]
        if event.kind is not EventKind.DONE:
            raise RuntimeError(event.text)
        return event


def ping(sender: Sender, count: int) -> list[float]:
    """us from write() to the armed counter, one write after the other, to slots that were all armed before."""
    receiver, starts = sender.receiver, []
    receiver.ask("arm each", count)
    for slot in range(count):
        starts.append(time.monotonic_ns())
        sender.write(0, slot)
        sender.done()
    ends = receiver.ask("arrivals", count)
    return [(end - start) / 1e3 for start, end in zip(starts, ends, strict=True)]


def ping_asleep(sender: Sender, count: int, pause: float) -> tuple[list[float], list[float]]:
    """As ping(), of engines that sleep in between; and us from there to the receiver's asyncio callback."""
    receiver, starts = sender.receiver, []
    receiver.tell("pong", count)
    for i in range(count):
        assert receiver.answer() is True
        time.sleep(pause)
        starts.append(time.monotonic_ns())
        sender.write(i % 1024)
        sender.done()
    times = receiver.answer()
    to_counter = [(end - start) / 1e3 for start, end in zip(starts, times["counted"], strict=True)]
    to_callback = [(end - start) / 1e3 for start, end in zip(times["counted"], times["called"], strict=True)]
    return to_counter, to_callback


def measure_ping(program: Path, provider: str, rounds: int, pause: float = 0.0) -> dict[str, Any]:
    """One signalled page, against a plain libfabric ping that spins on both sides and makes the same pauses."""
    raw = Raw(program, provider, "ping", page=PAGE, pages=PINGS, depth=1, pause_us=round(pause * 1e6))
    receiver = Receiver(provider, PAGE * PINGS, one_core=True)
    cores = os.sched_getaffinity(0)
    keep_to_core(0)
    sender = Sender(receiver, PAGE * PINGS)
    try:
        ping(sender, 64)
        ours, callbacks, plain = [], [], []
        for _ in range(rounds):
            to_counter, to_callback = ping_asleep(sender, PINGS, pause) if pause else (ping(sender, PINGS), [])
            ours.append(median(to_counter))
            callbacks += to_callback
            plain.append(raw.round()["median_us"])
    finally:
        os.sched_setaffinity(0, cores)
        raw.close()
        sender.engine.close()
        receiver.close()
    return {
        "bench": "fabric-ping",
        "provider": provider,
        "page_bytes": PAGE,
        "pause_us": round(pause * 1e6),
        "ours_us": round(median(ours), 1),
        "raw_us": round(median(plain), 1),
        "ratio": round(median(ours) / median(plain), 3),
        "ratio_of_pairs": round(median(mine / theirs for mine, theirs in zip(ours, plain, strict=True)), 3),
        "callback_us": round(median(callbacks), 1) if callbacks else None,
        "rounds": rounds,
    }


def measure_posting(provider: str, pause: float, layers: int = 400) -> dict[str, Any]:
    """From a layer counter's bump to the layer's first write, with the Python interpreter busy in another thread."""
    receiver, stop = Receiver(provider, PAGE), threading.Event()
    sender = Sender(receiver, PAGE, trace=True)
    counter = sender.engine.new_counter()
    bumps = []

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=compute)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # or this thread would get the interpreter back only after 5 ms
    busy.start()
    try:
        table = runs(np.arange(1), np.arange(1))
        sender.engine.schedule_layers(sender.chunk(table, 4096, counter=counter, first_value=1, layers=layers))
        for _ in range(layers):
            time.sleep(pause)
            bumps.append(time.monotonic_ns())
            counter.bump()
        done = sender.done()
    finally:
        stop.set()
        busy.join()
        sys.setswitchinterval(interval)
        sender.engine.close()
        receiver.close()
    waits = [(post - bump) / 1e3 for bump, post in zip(bumps, done.layers.posted, strict=True)]
    return {
        "bench": "fabric-bump-to-post",
        "provider": provider,
        "layer_us": round(median(np.diff(bumps)) / 1e3),
        "median_us": round(median(waits), 1),
        "p99_us": round(quantiles(waits, n=100)[98], 1),
        "layers": layers,
    }


def small_writes(sender: Sender, count: int, keep_busy: ChunkSchedule | None) -> list[float]:
    """us from write() to the armed counter, one after the other, beside a large transfer if there is one."""
    receiver, starts = sender.receiver, []
    large = sender.engine.schedule_layers(keep_busy) if keep_busy else None
    receiver.tell("pong", count)
    for i in range(count):
        assert receiver.answer() is True
        starts.append(time.monotonic_ns())
        small = sender.write(i % 1024)
        ended = set()
        while small not in ended:
            events = wait_events(sender.engine)
            failed = [event.text for event in events if event.kind is not EventKind.DONE]
            if failed:
                raise RuntimeError(failed[0])
            ended |= {event.transfer for event in events}
            if keep_busy and large in ended:
                ended.discard(large)
                large = sender.engine.schedule_layers(keep_busy)
    times = receiver.answer()
    if large:
        large.cancel()
        wait_events(sender.engine)
    return [(end - start) / 1e3 for start, end in zip(starts, times["counted"], strict=True)]


def measure_fairness(provider: str, size: int, count: int = 1000, large: int = 2 << 30) -> dict[str, Any]:
    """A small transfer's time to the receiver's counter, with and without a large one to the same receiver."""
    receiver = Receiver(provider, size)
    sender = Sender(receiver, size)
    pages = size // PAGE
    table = runs(np.random.default_rng(1).permutation(pages), np.random.default_rng(2).permutation(pages))
    chunk = sender.chunk(table, PAGE, layers=max(1, large // size), slot=SLOT + 1)
    try:
        small_writes(sender, 50, None)
        alone = quantiles(small_writes(sender, count, None), n=100)
        beside = quantiles(small_writes(sender, count, chunk), n=100)
    finally:
        sender.engine.close()
        receiver.close()
    return {
        "bench": "fabric-small-beside-large",
        "provider": provider,
        "page_bytes": PAGE,
        "large_bytes": max(1, large // size) * size,
        "alone_median_us": round(alone[49], 1),
        "alone_p99_us": round(alone[98], 1),
        "beside_median_us": round(beside[49], 1),
        "beside_p99_us": round(beside[98], 1),
    }
