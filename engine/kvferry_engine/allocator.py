"""The book of pages: which are free, which are held, which are in quarantine, which are kept for their content."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from kvferry_engine.errors import OutOfPagesError, PageError

FREE, HELD, QUARANTINED, CACHED = 0, 1, 2, 3
_STATES = (FREE, HELD, QUARANTINED, CACHED)
_STATE_NAMES = ("free", "held", "quarantined", "cached")

Run = tuple[int, int]
"""First page and one past the last."""


def runs_of(pages: Iterable[int]) -> list[Run]:
    """Sort `pages` into maximal runs of neighbours; raises PageError when a page is named twice."""
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and page == runs[-1][1]:
            runs[-1][1] += 1
        elif runs and page < runs[-1][1]:
            msg = f"page {page} is named twice"
            raise PageError(msg)
        else:
            runs.append([page, page + 1])
    return [(start, end) for start, end in runs]


class PageAllocator:
    """Hands out pages, long runs of neighbours where it can: a run of pages crosses the network as one write.

    Each page is in one of four states. `allocate` takes free pages into `held` and `free` takes them back;
    `quarantine` takes held pages out of use while a writer may still reach them and `release_quarantine` makes
    them free once it cannot. `keep` sets held pages aside for what is in them, until `revive` makes them held again or
    `evict` free. Not thread-safe: one scheduler owns it.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            msg = f"a page pool must have at least one page, got {pages}"
            raise ValueError(msg)
        self.pages = pages
        self._state = bytearray(pages)
        self._runs: list[Run] = [(0, pages)]
        self._counts = [pages, 0, 0, 0]

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self._counts[FREE]

    @property
    def held_pages(self) -> int:
        """Pages that requests use."""
        return self._counts[HELD]

    @property
    def quarantined_pages(self) -> int:
        """Pages that nobody uses and that a writer may still reach."""
        return self._counts[QUARANTINED]

    @property
    def cached_pages(self) -> int:
        """Pages that nobody uses and that are kept for their content."""
        return self._counts[CACHED]

    @property
    def free_runs(self) -> list[Run]:
        """Free pages as maximal runs in ascending order."""
        return list(self._runs)

    def can_allocate(self, count: int) -> bool:
        """Tell whether `count` pages are free, in however many runs."""
        return count <= self._counts[FREE]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages: the smallest run that holds them all, else the fewest runs.

        Raises OutOfPagesError, and takes nothing, when fewer are free.
        """
        if count < 0:
            msg = f"cannot allocate {count} pages"
            raise PageError(msg)
        if not self.can_allocate(count):
            msg = f"{count} pages asked for, {self.free_pages} of {self.pages} free"
            raise OutOfPagesError(msg)
        taken: list[int] = []
        while count:
            start, end = self._take_run(count)
            self._move(start, end, FREE, HELD)
            taken.extend(range(start, end))
            count -= end - start
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give held pages back; raises PageError, and changes nothing, unless every one is held."""
        self._release(pages, HELD)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Take held pages out of use without making them free; raises PageError unless every one is held."""
        for start, end in self._checked_runs(pages, HELD):
            self._move(start, end, HELD, QUARANTINED)

    def release_quarantine(self, pages: Sequence[int]) -> None:
        """Make quarantined pages free: no write to them is in flight; raises PageError unless all are quarantined."""
        self._release(pages, QUARANTINED)

    def keep(self, pages: Sequence[int]) -> None:
        """Set held pages aside for their content; raises PageError unless every one is held."""
        for start, end in self._checked_runs(pages, HELD):
            self._move(start, end, HELD, CACHED)

    def revive(self, pages: Sequence[int]) -> None:
        """Make cached pages held again; raises PageError unless every one is cached."""
        for start, end in self._checked_runs(pages, CACHED):
            self._move(start, end, CACHED, HELD)

    def evict(self, pages: Sequence[int]) -> None:
        """Make cached pages free; raises PageError unless every one is cached."""
        self._release(pages, CACHED)

    def check(self) -> None:
        """Audit the book: states, counts and runs must tell the same story; raises PageError."""
        counted = [self._state.count(state) for state in _STATES]
        free = runs_of(page for page, state in enumerate(self._state) if state == FREE)
        if counted != self._counts:
            msg = f"page counts {self._counts} differ from the states {counted} ({', '.join(_STATE_NAMES)})"
            raise PageError(msg)
        if free != self._runs:
            msg = "the free runs differ from the pages whose state is free"
            raise PageError(msg)

    def _take_run(self, count: int) -> Run:
        """Cut up to `count` pages from the best-fitting run, or take the whole of the longest."""
        lengths = [end - start for start, end in self._runs]
        fitting = [length for length in lengths if length >= count]
        index = lengths.index(min(fitting) if fitting else max(lengths))
        start, end = self._runs[index]
        if end - start <= count:
            del self._runs[index]
            return start, end
        self._runs[index] = (start + count, end)
        return start, start + count

    def _release(self, pages: Sequence[int], state: int) -> None:
        for start, end in self._checked_runs(pages, state):
            self._move(start, end, state, FREE)
            self._insert_run(start, end)

    def _insert_run(self, start: int, end: int) -> None:
        """Put a run among the free ones, joined with the neighbours it touches."""
        index = bisect_left(self._runs, (start, end))
        if index < len(self._runs) and self._runs[index][0] == end:
            end = self._runs.pop(index)[1]
        if index and self._runs[index - 1][1] == start:
            start = self._runs.pop(index - 1)[0]
        insort(self._runs, (start, end))

    def _checked_runs(self, pages: Sequence[int], state: int) -> list[Run]:
        """Runs of `pages`, all of which must be in `state`."""
        runs = runs_of(pages)
        if runs and (runs[0][0] < 0 or runs[-1][1] > self.pages):
            foreign = runs[0][0] if runs[0][0] < 0 else runs[-1][1] - 1
            msg = f"page {foreign} is not one of this pool's {self.pages}"
            raise PageError(msg)
        for start, end in runs:
            if self._state.count(state, start, end) != end - start:
                page = next(page for page in range(start, end) if self._state[page] != state)
                msg = f"page {page} is {_STATE_NAMES[self._state[page]]}, not {_STATE_NAMES[state]}"
                raise PageError(msg)
        return runs

    def _move(self, start: int, end: int, source: int, target: int) -> None:
        self._state[start:end] = bytes((target,)) * (end - start)
        self._counts[source] -= end - start
        self._counts[target] += end - start
