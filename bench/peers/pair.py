"""Two processes and one system between them: `python -m peers.pair SYSTEM PAGE_BYTES PAGES BATCH WINDOW`.

It checks every byte, prints {"ready": true}, and then answers each line on stdin with a timed round: seconds from the
first post to the moment when the receiver knows of the last batch. It ends with stdin.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from peers.work import PATIENCE, Receiver, Sender, Work, wrong_pages

SYSTEMS = {
    "ours": ("over_fabric", "Fabric"),
    "nixl": ("over_nixl", "Nixl"),
    "mooncake": ("over_mooncake", "Mooncake"),
}


def side(system: str, what: str, work: Work) -> Any:  # noqa: ANN401 - a Sender or a Receiver
    """Open one side of a system; the second half of its name, as tcp, is told to it."""
    family, _, transport = system.partition("-")
    module, prefix = SYSTEMS[family]
    return getattr(importlib.import_module(f"peers.{module}"), f"{prefix}{what}")(work, transport)


def receive(pipe: Connection, system: str, work: Work) -> None:
    """The receiver's process: obeys its sender until the pipe closes."""
    receiver: Receiver = side(system, "Receiver", work)
    pipe.send(receiver.card)
    receiver.meet(pipe.recv())
    while True:
        try:
            word, number = pipe.recv()
        except EOFError:
            os._exit(0)  # what peers do at the interpreter's end is not for us to time, or to wait for
        if word == "check":
            pipe.send(wrong_pages(work, receiver.memory))  # type: ignore[attr-defined]
            continue
        receiver.arm(number)
        pipe.send("armed")
        if hasattr(receiver, "wait"):
            pipe.send(receiver.wait(work.batches))
        else:
            pipe.recv()
            pipe.send(time.monotonic_ns())


def one_round(sender: Sender, pipe: Connection, work: Work, number: int, told: bool) -> float:
    """Move every page once; seconds. `told`: the receiver must be told of the end."""
    pipe.send(("round", number))
    pipe.recv()
    live: deque[Any] = deque()
    start = time.monotonic_ns()
    for batch in range(work.batches):
        if len(live) == work.window:
            sender.finish(live.popleft())
        live.append(sender.post(batch, number))
    while live:
        sender.finish(live.popleft())
    if told:
        pipe.send("end")
    end = time.monotonic() + PATIENCE
    while not pipe.poll(0.0005):
        sender.progress()
        if time.monotonic() > end:
            raise TimeoutError("the receiver has not heard of the last batch")
    return float(pipe.recv() - start) / 1e9


def main(system: str, work: Work) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a peer prints is no answer
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs, system, work), daemon=True)
    process.start()
    theirs.close()
    sender: Sender = side(system, "Sender", work)
    sender.meet(pipe.recv())
    pipe.send(sender.card)
    told = system.startswith("mooncake")
    one_round(sender, pipe, work, 0, told)
    pipe.send(("check", 0))
    if wrong := pipe.recv():
        raise RuntimeError(f"{wrong} of {work.pages} pages arrived wrong")
    answers.write(json.dumps({"ready": True}) + "\n")
    for number, _ in enumerate(sys.stdin, 1):
        answers.write(json.dumps({"seconds": one_round(sender, pipe, work, number, told)}) + "\n")
    pipe.close()
    process.join(10)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Work(*(int(word) for word in sys.argv[2:6])))
