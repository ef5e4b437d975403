"""A service's life: one uvloop, signals that ask it to stop, and no task whose failure nobody sees."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import psutil
import uvloop

from kvferry_node.errors import NodeError
from kvferry_node.logs import get_logger
from kvferry_node.sockets import flush_sockets

LOOK_SECONDS = 0.25
"""Between two looks for a standstill; more often where a shorter one counts, or the looks would be taken for it."""


class Stop:
    """How a service learns that it shall end: drain, leave, return from its main function."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.reason = ""

    def request(self, reason: str) -> None:
        """Ask the service to end."""
        self.reason = self.reason or reason
        self.requested.set()


Main = Callable[[Stop], Awaitable[None]]


def run(main: Main, explained: tuple[type[Exception], ...] = ()) -> None:
    """Run a service's main function, and end the process.

    SIGTERM or SIGINT sets `Stop.requested`; a second one ends the process at once with 128 + its number. Returns when
    `main` returns; an exception of it, or of a task that nobody awaits, is logged and exits with status 1. Those that
    are `explained`, besides a NodeError, say to the user what is wrong: where they came from is left out.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_supervise(main))
    except Exception as error:  # noqa: BLE001  # the last stop: it becomes a log line and an exit status
        told = {"error": str(error)} if isinstance(error, (NodeError, *explained)) else {"exc_info": error}
        get_logger().critical("the service has failed", **told)
        sys.exit(1)
    finally:
        flush_sockets()


async def _supervise(main: Main) -> None:
    loop = asyncio.get_running_loop()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop, number)
    work = asyncio.ensure_future(main(stop))
    lost: list[BaseException] = []

    def on_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        get_logger().error("unhandled in the event loop", message=context["message"], exc_info=error)
        lost.append(error)
        work.cancel()

    loop.set_exception_handler(on_error)
    try:
        await work
    except asyncio.CancelledError:
        if not lost:
            raise
    if lost:
        raise lost[0]


def _on_signal(stop: Stop, number: int) -> None:
    name = signal.Signals(number).name
    if stop.requested.is_set():
        get_logger().warning("second signal: exiting at once", signal=name)
        os._exit(128 + number)
    get_logger().info("stopping", signal=name)
    stop.request(name)


@contextlib.asynccontextmanager
async def running(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.TaskGroup]:
    """Run `loops` (heartbeats, sockets, schedulers) beside the body, and cancel them when it ends.

    A loop that fails cancels the body, and the failure is raised; so no task is ever lost. Tasks that the body adds to
    the group are waited for, not cancelled.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop, name=getattr(loop, "__qualname__", "loop")) for loop in loops]
        try:
            yield group
        finally:
            for task in tasks:
                task.cancel()


async def wait_until(condition: Callable[[], bool], seconds: float, *, every: float = 0.02) -> bool:
    """Wait until `condition` holds, at most `seconds`; return whether it does. For draining."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(every)
    return True


async def watch_standstill(longest: float, on_standstill: Callable[[float], None]) -> None:
    """Call `on_standstill` with the seconds, whenever this process has stood still for longer than `longest`.

    A process that was stopped, or starved, for so long that its lease ended was taken for lost by everyone else.
    """
    every = min(LOOK_SECONDS, longest / 4)
    while True:
        before = time.monotonic()
        await asyncio.sleep(every)
        away = time.monotonic() - before
        if away > longest:
            get_logger().warning("stood still so long that the lease may have ended", seconds=round(away, 3))
            on_standstill(away)


def process_state() -> dict[str, int]:
    """Return this process's threads, open file descriptors and resident bytes."""
    process = psutil.Process()
    return {"threads": process.num_threads(), "fds": process.num_fds(), "rss": process.memory_info().rss}
