"""Keeps a set of children up: starts them, waits for them, restarts them, ends them."""

import asyncio
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from kvferry.cli.up.backoff import FIRST_SECONDS, Backoff
from kvferry.cli.up.child import Child, ChildState
from kvferry.cli.up.spec import ChildSpec, Stage

PROBE_SECONDS = 0.1
"""How often a child that is starting is asked whether it is ready."""

Report = Callable[[Child, str], None]
"""Told of everything that happens to a child, in words."""
Waiting = Callable[[list[Child]], None]
"""Told, again and again, which children are not ready yet."""


class StartError(Exception):
    """The cluster did not come up; `child` is to blame."""

    def __init__(self, child: Child, message: str) -> None:
        super().__init__(message)
        self.child = child


class Supervisor:
    """Children, each watched by a task of its own."""

    def __init__(
        self, specs: list[ChildSpec], log_dir: Path, report: Report, first_backoff: float = FIRST_SECONDS
    ) -> None:
        """Take over `log_dir`: each child's log there begins anew."""
        self.children = [Child(spec, log_dir / f"{spec.name}.log") for spec in specs]
        self._report = report
        self._first_backoff = first_backoff
        self._up = False
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, seconds: float, waiting: Waiting = lambda _late: None) -> None:
        """Start all, Redis before those that need it, and wait until all are ready.

        Raises StartError when one dies meanwhile, or is not ready after `seconds`.
        """
        deadline = time.monotonic() + seconds
        for wanted in (True, False):
            batch = [child for child in self.children if (child.spec.stage is Stage.REDIS) is wanted]
            for child in batch:
                task = asyncio.create_task(self._keep(child))
                task.add_done_callback(self._on_end)
                self._tasks.append(task)
            while late := [child for child in batch if child.state is not ChildState.READY]:
                waiting(late)
                await self._wait_a_little(late, deadline, seconds)
        self._up = True

    async def watch(self) -> None:
        """Wait for what restarting can't mend: raises the OSError that kept a child from being started at all."""
        await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """End all: router, decoders, prefillers, Redis, each stage after the one before it is gone."""
        self._stopping.set()
        ordered = sorted(self.children, key=lambda child: child.spec.stage)
        for _, stage in groupby(ordered, key=lambda child: child.spec.stage):
            await asyncio.gather(*(self._end(child) for child in stage))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure.done():
            self._failure.exception()

    def hurry(self) -> None:
        """Wait for nobody any more: what is still there gets SIGKILL."""
        self._hurry.set()

    async def _wait_a_little(self, late: list[Child], deadline: float, seconds: float) -> None:
        if time.monotonic() > deadline:
            msg = f"{late[0].spec.name} was not ready within {seconds:g} s: {late[0].why}"
            raise StartError(late[0], msg)
        await asyncio.wait({self._failure}, timeout=PROBE_SECONDS)
        if self._failure.done():
            self._failure.result()

    async def _keep(self, child: Child) -> None:
        """Run one child, life after life."""
        backoff = Backoff(self._first_backoff)
        while not self._stopping.is_set():
            await child.launch()
            probing = asyncio.create_task(self._probe(child))
            await child.wait()
            probing.cancel()
            await asyncio.wait({probing})
            if self._stopping.is_set():
                break
            child.enter(ChildState.DIED)
            if not self._up:
                self._fail(child)
                break
            delay = backoff.next(time.monotonic())
            self._report(child, f"{child.ending()}; starting it again in {delay:.1f} s (log: {child.log})")
            await self._pause(delay)
        child.enter(ChildState.STOPPED)

    async def _probe(self, child: Child) -> None:
        begun = time.monotonic()
        while (why := await child.spec.probe()) is not None:
            child.why = why
            await asyncio.sleep(PROBE_SECONDS)
        child.enter(ChildState.READY)
        self._report(child, f"ready after {time.monotonic() - begun:.1f} s")

    def _fail(self, child: Child) -> None:
        if not self._failure.done():
            self._failure.set_exception(StartError(child, f"{child.spec.name} {child.ending()} while starting"))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _end(self, child: Child) -> None:
        if not await child.stop(self._hurry):
            asked = self._hurry.is_set()
            self._report(child, "killed, as asked" if asked else "did not end in time and was killed")
