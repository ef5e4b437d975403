"""A cluster of two worker nodes on this machine, each on a core of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

READY_SECONDS = 180
STOP_SECONDS = 60
SHAPES = {"mixed": ["--mixed", "--decoders", "2"], "disaggregated": ["--prefillers", "1", "--decoders", "1"]}


@contextmanager
def cluster(shape: str, folder: Path, flags: list[str]) -> Iterator[str]:
    """Start it, pin its worker nodes, and give its ZeroMQ endpoint. Stopped at the end."""
    port, zmq_port = _free_port(), _free_port()
    command = [sys.executable, "-m", "kvferry.cli", "up", "--port", str(port), "--zmq-port", str(zmq_port)]
    command += ["--threads", "1", "--dtype", "bfloat16", "--log-level", "warning", "--log-dir", str(folder / shape)]
    command += [*SHAPES[shape], *flags]
    with (folder / f"{shape}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait(process, f"http://127.0.0.1:{port}/ready", folder / f"{shape}.log")
        _pin(process.pid)
        yield f"tcp://127.0.0.1:{zmq_port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)


def _pin(parent: int) -> None:
    """Give every worker node a core, in turns; router and Redis stay free to run where there is room.

    Beside a decoder's forward pass all else, the load generator too, took 2.7 % of its core.
    """
    cores = sorted(os.sched_getaffinity(0))
    workers = [
        child
        for child in psutil.Process(parent).children(recursive=True)
        if {"kvferry_decoder", "kvferry_prefiller"} & set(child.cmdline())
    ]
    for index, worker in enumerate(sorted(workers, key=lambda each: each.cmdline())):
        for thread in worker.threads():  # affinity is a thread's own, and those of torch are there already
            os.sched_setaffinity(thread.id, {cores[index % len(cores)]})


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            msg = f"the cluster did not come up:\n{log.read_text(errors='replace')[-2000:]}"
            raise RuntimeError(msg)
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
