"""A receiver in a process of its own, obeying lines of JSON; and the handle that the benches hold of it."""

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from kvferry_fabric import Event, EventKind, SharedMemory, TransferEngine
from kvferry_proto.memory import MemoryDescriptor

SEED = 11
SLOT = 1
PATIENCE = 120.0
SOURCE_STEP, TARGET_STEP = 104729, 7919
"""Odd, so that multiplying permutes a number of pages that is a power of two; the same steps as in fabric_limit.c."""


def random_memory(size: int) -> np.ndarray:
    """The same random bytes in every process."""
    return np.random.default_rng(SEED).integers(0, 1 << 63, size // 8, dtype=np.int64).view(np.uint8)


def scattered(pages: int, run: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Source and destination pages: all of them, in runs of `run` neighbours that are scattered on both sides."""
    blocks = np.arange(pages // run, dtype=np.int64)
    within = np.arange(run)
    source = (blocks * SOURCE_STEP % blocks.size)[:, None] * run + within
    target = (blocks * TARGET_STEP % blocks.size)[:, None] * run + within
    return source.reshape(-1), target.reshape(-1)


def wait_events(engine: TransferEngine, seconds: float = PATIENCE) -> list:
    """Sleep until the engine has events, and take them."""
    end = time.monotonic() + seconds
    while not (events := engine.poll()):
        left = end - time.monotonic()
        if left <= 0:
            msg = f"nothing happened within {seconds} s"
            raise TimeoutError(msg)
        select.select([engine.event_fd], [], [], left)
    return events


class Receiver:
    """The process, as the benches see it. One slot is armed at a time, each time under a new generation."""

    def __init__(self, provider: str, size: int, **options: Any) -> None:  # noqa: ANN401 - options of TransferEngine
        self.process = subprocess.Popen(
            [sys.executable, __file__, provider, str(size), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        self.descriptor = msgspec.convert(self.answer(), MemoryDescriptor)
        self.generation = 0

    def answer(self) -> Any:  # noqa: ANN401 - what the command answers
        """Wait for one answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            msg = "the receiver process ended"
            raise RuntimeError(msg)
        return json.loads(line)

    def tell(self, *words: Any) -> None:  # noqa: ANN401 - the command's words
        """Give a command without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: Any) -> Any:  # noqa: ANN401 - what the command answers
        """Give a command and return its answer."""
        self.tell(*words)
        return self.answer()

    def arm(self, pages: int) -> int:
        """Expect so many pages; return the generation."""
        self.generation = (self.generation + 1) % 1024
        self.ask("arm", self.generation, pages)
        return self.generation

    def arrival_ns(self) -> int:
        """When the last of them came, monotonic ns; disarms."""
        return int(self.ask("arrival", self.generation))

    def check(self, page: int, run: int, pages: int) -> None:
        """Compare every byte of what scattered() has moved. Raises RuntimeError if one differs."""
        wrong = self.ask("check", page, run, pages)
        if wrong:
            msg = f"{wrong} of {pages} pages of {page} bytes arrived wrong"
            raise RuntimeError(msg)

    def close(self) -> None:
        """End the process."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait(20)


def check(memory: np.ndarray, page: int, run: int, pages: int) -> int:
    """Number of pages that differ from what they should hold; clears the memory."""
    source, target = scattered(pages, run)
    want = random_memory(memory.size)[: pages * page].reshape(pages, page)
    wrong = int((memory[: pages * page].reshape(pages, page)[target] != want[source]).any(axis=1).sum())
    memory[:] = 0
    return wrong


async def pong(engine: TransferEngine, count: int) -> dict[str, list[int]]:
    """Arm and wait `count` times; the sender is told through stdout that a slot is armed. Times are monotonic ns."""
    counted, called = [], []
    events: asyncio.Queue[Event] = asyncio.Queue()

    def callback(event: Event) -> None:
        called.append(time.monotonic_ns())
        events.put_nowait(event)

    engine.attach(asyncio.get_running_loop(), callback)
    for i in range(count):
        engine.expect(SLOT, i % 1024, 1)
        print("true", flush=True)
        counted.append((await events.get()).last_arrival_ns)
        engine.disarm(SLOT, i % 1024)
    engine.detach()
    return {"counted": counted, "called": called}


def arrivals(engine: TransferEngine, count: int) -> list[int]:
    """When each of the slots up to `count` got its page; disarms them. Times are monotonic ns."""
    events: list[Event] = []
    while len(events) < count:
        events += wait_events(engine)
    for slot in range(count):
        engine.disarm(slot, 0)
    return [event.last_arrival_ns for event in sorted(events, key=lambda event: event.slot)]


def obey(engine: TransferEngine, memory: np.ndarray, words: list[Any]) -> object:
    match words:
        case ["arm", generation, pages]:
            engine.expect(SLOT, generation, pages)
            return True
        case ["arrival", generation]:
            event = wait_events(engine)[0]
            assert event.kind is EventKind.ARRIVED, event
            engine.disarm(SLOT, generation)
            return event.last_arrival_ns
        case ["check", page, run, pages]:
            return check(memory, page, run, pages)
        case ["arm each", count]:
            for slot in range(count):
                engine.expect(slot, 0, 1)
            return True
        case ["arrivals", count]:
            return arrivals(engine, count)
        case ["pong", count]:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the services' loop
                return runner.run(pong(engine, count))
    msg = f"{words} is no command"
    raise ValueError(msg)


def keep_to_core(index: int) -> None:
    """Keep this process, with the threads that it will start, to one core, if there are several."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[index]})


def main(provider: str, size: int, options: dict[str, Any]) -> None:
    if options.pop("one_core", False):
        keep_to_core(-1)
    shared = SharedMemory.create(size, "kvferry-bench")
    memory = np.frombuffer(shared.buffer, np.uint8)
    memory[:] = 1
    with TransferEngine(provider, incarnation=2, **options) as engine, engine.register(shared) as region:
        print(json.dumps(msgspec.to_builtins(region.descriptor)), flush=True)
        for line in sys.stdin:
            print(json.dumps(obey(engine, memory, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
