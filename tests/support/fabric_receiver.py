"""A receiver in a process of its own: registers memory, prints its descriptor as JSON, then obeys lines on stdin.

Commands, each answered by one line of JSON: `expect SLOT GENERATION PAGES`, `disarm SLOT GENERATION`, `wait SECONDS`
(the kinds of the events that came), `hash` (XXH3 of its memory), `pages SLOT COUNT PAGE_BYTES PAGE...` (XXH3 of the
named pages, once so many have come for the slot), `stats`, `quit`. KVFERRY_TEST_SILENCE: the engine's silence_seconds.
"""

import json
import os
import sys
import time

import msgspec
import numpy as np
import xxhash
from kvferry_fabric import SharedMemory, TransferEngine

BIND = os.environ.get("KVFERRY_TEST_BIND", "127.0.0.1")


def wait(engine: TransferEngine, seconds: float) -> list[str]:
    """Kinds of the events that came; returns at the first ones."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        events = engine.poll()
        if events:
            return [event.kind.name for event in events]
        time.sleep(0.001)
    return []


def pages(engine: TransferEngine, memory: np.ndarray, words: list[int]) -> str:
    """XXH3 of pages, once a slot has counted them."""
    slot, count, size, *named = words
    end = time.monotonic() + 20
    while engine.arrived(slot) < count and time.monotonic() < end:
        time.sleep(0.0005)
    found = memory.reshape(-1, size)[named] if engine.arrived(slot) == count else memory[:0]
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(found))


def obey(engine: TransferEngine, memory: np.ndarray, line: list[str]) -> object:
    """Carry out one command and return its answer."""
    if line[0] == "expect":
        engine.expect(int(line[1]), int(line[2]), int(line[3]))
        return "armed"
    if line[0] == "disarm":
        return engine.disarm(int(line[1]), int(line[2]))
    if line[0] == "pages":
        return pages(engine, memory, [int(word) for word in line[1:]])
    if line[0] == "wait":
        return wait(engine, float(line[1]))
    if line[0] == "hash":
        return xxhash.xxh3_64_hexdigest(memory)
    return engine.stats()._asdict()


def main(provider: str, size: int, domains: tuple[str, ...]) -> None:
    """Serve until `quit` or the end of stdin."""
    shared = SharedMemory.create(size, "kvferry-test")
    memory = np.frombuffer(shared.buffer, np.uint8)
    silence = float(os.environ.get("KVFERRY_TEST_SILENCE", "5"))
    engine = TransferEngine(provider, incarnation=2, domains=domains, silence_seconds=silence)
    with engine, engine.register(shared) as region:
        print(json.dumps(msgspec.to_builtins(region.descriptor)), flush=True)  # noqa: T201 - the protocol
        for line in sys.stdin:
            words = line.split()
            if words[0] == "quit":
                break
            print(json.dumps(obey(engine, memory, words)), flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), tuple(sys.argv[3:]) or (BIND,))
