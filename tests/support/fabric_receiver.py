"""A receiver in a process of its own: registers memory, prints its descriptor as JSON, then obeys lines on stdin.

Commands: `expect SLOT GENERATION PAGES`, `wait SECONDS` (answers with the kinds of the events that came),
`hash` (XXH3 of its memory), `stats`, `quit`. Every command is answered by one line of JSON.
"""

import json
import os
import sys
import time

import msgspec
import numpy as np
import xxhash
from kvferry_fabric import TransferEngine

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


def obey(engine: TransferEngine, memory: np.ndarray, line: list[str]) -> object:
    """Carry out one command and return its answer."""
    if line[0] == "expect":
        engine.expect(int(line[1]), int(line[2]), int(line[3]))
        return "armed"
    if line[0] == "wait":
        return wait(engine, float(line[1]))
    if line[0] == "hash":
        return xxhash.xxh3_64_hexdigest(memory)
    return engine.stats()._asdict()


def main(provider: str, size: int) -> None:
    """Serve until `quit` or the end of stdin."""
    memory = np.zeros(size, np.uint8)
    with TransferEngine(provider, incarnation=2, bind=BIND) as engine, engine.register(memoryview(memory)) as region:
        print(json.dumps(msgspec.to_builtins(region.descriptor)), flush=True)  # noqa: T201 - the protocol
        for line in sys.stdin:
            words = line.split()
            if words[0] == "quit":
                break
            print(json.dumps(obey(engine, memory, words)), flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
