"""One child process: started in a session of its own, logged to a file, ended in bounded time."""

import asyncio
import contextlib
import enum
import os
import signal
import sys
from collections import deque
from pathlib import Path

from kvferry.cli.up import tether
from kvferry.cli.up.spec import ChildSpec

KILL_SECONDS = 10.0
"""How long the kernel may take to end a process that was sent SIGKILL."""
TAIL_LINES = 15
TAIL_BYTES = 1 << 16


class ChildState(enum.Enum):
    """Where a child stands."""

    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    DIED = "died"
    STOPPED = "stopped"


TRANSITIONS: dict[ChildState, frozenset[ChildState]] = {
    ChildState.IDLE: frozenset({ChildState.STARTING, ChildState.STOPPED}),
    ChildState.STARTING: frozenset({ChildState.READY, ChildState.DIED, ChildState.STOPPED}),
    ChildState.READY: frozenset({ChildState.DIED, ChildState.STOPPED}),
    ChildState.DIED: frozenset({ChildState.STARTING, ChildState.STOPPED}),
    ChildState.STOPPED: frozenset(),
}


class Child:
    """A child process over all its lives."""

    def __init__(self, spec: ChildSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.state = ChildState.IDLE
        self.why = "starting"
        """Why it is not ready, in its own words."""
        self.code: int | None = None
        """Exit status of the last life; negative: the signal that ended it."""
        self._process: asyncio.subprocess.Process | None = None
        self.log.write_bytes(b"")

    @property
    def pid(self) -> int | None:
        """Process id of the present life, which is also its process group."""
        return None if self._process is None else self._process.pid

    def enter(self, state: ChildState) -> None:
        """Change state. Raises RuntimeError for a change that makes no sense."""
        if state not in TRANSITIONS[self.state]:
            msg = f"{self.spec.name} cannot become {state.value}: it is {self.state.value}"
            raise RuntimeError(msg)
        self.state = state

    async def launch(self) -> None:
        """Begin a life."""
        self.enter(ChildState.STARTING)
        command = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self.spec.argv]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.spec.env,
                start_new_session=True,
            )

    async def wait(self) -> None:
        """Wait for the end of this life, and end what it has left behind in its process group."""
        if self._process is None:
            return
        process = self._process
        self.code = await process.wait()
        self._signal(signal.SIGKILL)
        self._process = None

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Send SIGTERM, and SIGKILL after the grace or at `hurry`; returns whether it went by itself."""
        if self._process is None:
            return True
        gone = asyncio.ensure_future(self._process.wait())
        hurried = asyncio.ensure_future(hurry.wait())
        self._signal(signal.SIGTERM)
        await asyncio.wait({gone, hurried}, timeout=self.spec.grace, return_when=asyncio.FIRST_COMPLETED)
        willing = gone.done()
        self._signal(signal.SIGKILL)
        await asyncio.wait({gone}, timeout=KILL_SECONDS)
        for task in (gone, hurried):
            task.cancel()
        return willing

    def tail(self) -> str:
        """Return the last lines of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return "\n".join(deque(log.read().decode(errors="replace").splitlines(), TAIL_LINES))

    def ending(self) -> str:
        """Say how the last life ended."""
        if self.code is None:
            return "has not ended"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with status {self.code}"

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
