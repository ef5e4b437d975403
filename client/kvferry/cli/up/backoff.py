"""How soon a child that died is started again."""

from collections import deque

FIRST_SECONDS = 0.5
LARGEST_SECONDS = 10.0
WINDOW_SECONDS = 60.0
MOST_IN_WINDOW = 5


class Backoff:
    """Doubles the delay with every recent death, and allows MOST_IN_WINDOW restarts in WINDOW_SECONDS."""

    def __init__(self, first: float = FIRST_SECONDS) -> None:
        self._first = first
        self._restarts: deque[float] = deque()

    def next(self, now: float) -> float:
        """Return how many seconds to wait before the restart that is due at `now`, and count it."""
        while self._restarts and self._restarts[0] <= now - WINDOW_SECONDS:
            self._restarts.popleft()
        delay = min(LARGEST_SECONDS, self._first * 2.0 ** len(self._restarts))
        if len(self._restarts) >= MOST_IN_WINDOW:
            delay = max(delay, self._restarts[-MOST_IN_WINDOW] + WINDOW_SECONDS - now)
        self._restarts.append(now + delay)
        return delay
