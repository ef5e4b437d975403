"""Waiting, in the caller's own thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvferry.exchange import Exchange
from kvferry.limits import no_router

# One nap; the loop around it goes on. A bound, so that poll's int milliseconds never overflow.
_NAP = 3600.0


class Pump:
    """Drives an exchange from one thread at a time."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._busy = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the exchange. Raises RuntimeError if another thread does."""
        if not self._busy.acquire(blocking=False):
            msg = "a kvferry.Client is in use by another thread; every thread needs its own"
            raise RuntimeError(msg)
        try:
            yield
        finally:
            self._busy.release()

    def connect(self, seconds: float) -> None:
        """Wait for a router to be there. Raises ConnectionLost after `seconds`."""
        self.exchange.turn()
        if not self.until(lambda: self.exchange.connected, time.monotonic() + seconds):
            raise no_router(self.exchange.link, seconds)

    def until(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Take in what arrives until `ready`, or until the deadline; returns whether it is ready."""
        while not ready():
            left = _NAP if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self.exchange.link.wait(min(left, _NAP))
            self.exchange.turn()
        return True
