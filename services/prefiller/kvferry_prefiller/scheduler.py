"""The batch scheduler: which chunks of which prompts the next forward pass runs.

First come, first served, up to `chunk_size` tokens a pass: a long prompt fills passes alone, short ones share one. A
request's pages are reserved for its whole prompt before its first chunk, so several long prompts can't hold a part
of the pool each and wait for the rest.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvferry_engine.allocator import PageAllocator
from kvferry_proto.layout import KVLayout

from kvferry_prefiller.request import Request, State


class Chunk(NamedTuple):
    """Part of a prompt that one forward pass computes."""

    request: Request
    start: int
    tokens: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.tokens

    @property
    def last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.end == self.request.length


def pages_to_send(chunk: Chunk, page_size: int) -> range:
    """Return the indices, in the request's page table, of the pages that leave with a chunk.

    A page leaves with the chunk that fills it, and the prompt's last page with the last chunk, full or not: every
    page leaves exactly once. A chunk that fills no page sends none.
    """
    first = chunk.start // page_size
    end = -(-chunk.end // page_size) if chunk.last else chunk.end // page_size
    return range(first, end)


class Scheduler:
    """Owns the requests of a prefiller and their pages. Pure bookkeeping: no clock, no socket, no tensor."""

    def __init__(
        self, allocator: PageAllocator, layout: KVLayout, *, chunk_size: int, max_running: int, max_waiting: int
    ) -> None:
        self.allocator = allocator
        self.layout = layout
        self.chunk_size = chunk_size
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: deque[Request] = deque()
        """Requests with chunks left to compute."""
        self.leaving: set[Request] = set()
        """Requests whose writes are under way (DRAINING), or that stop."""

    @property
    def requests(self) -> Iterable[Request]:
        """Every request that holds a place."""
        return [*self.waiting, *self.running, *self.leaving]

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens taken and not computed."""
        return sum(request.remaining for request in (*self.waiting, *self.running))

    def can_hold(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens fits into the pool at all."""
        return self.layout.pages_for(tokens) <= self.allocator.pages

    def can_add(self) -> bool:
        """Whether the queue has a place."""
        return len(self.waiting) < self.max_waiting

    def add(self, request: Request) -> None:
        """Put a request at the queue's end."""
        self.waiting.append(request)

    def plan_step(self) -> list[Chunk]:
        """Return the next pass's chunks; empty when there is nothing to compute."""
        self._admit()
        chunks = []
        budget = self.chunk_size
        for request in self.running:
            if not budget:
                break
            count = min(budget, request.remaining)
            budget -= count
            request.in_step = True
            chunks.append(Chunk(request, request.computed, count))
        return chunks

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.leaving) < self.max_running:
            needed = self.layout.pages_for(self.waiting[0].length)
            if not self.allocator.can_allocate(needed):
                return
            request = self.waiting.popleft()
            request.pages = self.allocator.allocate(needed)
            request.machine.move(State.RUNNING)
            self.running.append(request)

    def finish_step(self, chunks: list[Chunk]) -> None:
        """The chunks' KV is in the pool. Requests whose last chunk it was wait for their writes now."""
        for chunk in chunks:
            request = chunk.request
            request.in_step = False
            if request.state is not State.RUNNING:
                continue
            request.computed = chunk.end
            if chunk.last:
                self.running.remove(request)
                self.leaving.add(request)
                request.machine.move(State.DRAINING)

    def stop(self, request: Request) -> None:
        """Compute no more of a request; it leaves when nothing of it is in flight."""
        match request.state:
            case State.WAITING:
                self.waiting.remove(request)
                self.leaving.add(request)
            case State.RUNNING:
                self.running.remove(request)
                self.leaving.add(request)
        request.machine.move(State.STOPPING)

    def can_release(self, request: Request) -> bool:
        """Whether nothing computes into, or reads from, a leaving request's pages any more."""
        return request in self.leaving and not request.transfers and not request.in_step

    def release(self, request: Request) -> None:
        """Free the pages of a request for which `can_release` holds, and forget it."""
        self.leaving.remove(request)
        request.machine.move(State.STOPPED if request.state is State.STOPPING else State.DONE)
        if request.pages:
            self.allocator.free(request.pages)
            request.pages = []
