"""The batch scheduler: which chunks of which prompts the next forward pass runs.

A pass takes up to `chunk_size` tokens of several prompts: least left to compute first, so that one long document does
not hold up a hundred short questions. Those that have been here longer than the age limit are no longer overtaken: half
of every pass is theirs, in order of arrival, so that a stream of short questions does not starve the document either.

A request's pages are reserved for its whole prompt before its first chunk, so several long prompts can't hold a part of
the pool each and wait for the rest. Pages that the cache has are shared and not computed; those computed are published
when they are full.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvferry_engine.prefix_cache import PrefixCache
from kvferry_proto.hashing import block_hashes
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

    @property
    def wants_context(self) -> bool:
        """Whether the hidden state after it is to be sent."""
        return self.last and self.request.order.context is not None


def pages_to_send(chunk: Chunk, page_size: int) -> range:
    """Return the indices, in the request's page table, of the pages that leave with a chunk.

    A page leaves with the chunk that fills it, and the prompt's last page with the last chunk, full or not: every
    page that the decoder lacks leaves exactly once. A chunk that fills no page sends none.
    """
    first = max(chunk.start // page_size, chunk.request.order.first_page)
    end = -(-chunk.end // page_size) if chunk.last else chunk.end // page_size
    return range(first, end)


def pages_to_send_at_once(request: Request) -> range:
    """Return the indices of the pages that the decoder lacks and that need not be computed."""
    return range(request.order.first_page, request.held)


class Scheduler:
    """Owns the requests of a prefiller and their pages. Pure bookkeeping: no clock, no socket, no tensor.

    Times are those of `Request.timeline.received`, monotonic ns.
    """

    def __init__(
        self,
        allocator: PrefixCache,
        layout: KVLayout,
        *,
        chunk_size: int,
        max_running: int,
        max_waiting: int,
        age_limit_ns: int = 0,
    ) -> None:
        """`age_limit_ns`: how long a request may be overtaken by those that came later."""
        self.allocator = allocator
        self.layout = layout
        self.chunk_size = chunk_size
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.age_limit_ns = age_limit_ns
        self._arrivals = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
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
        request.number = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    def admit(self, at: int) -> list[Request]:
        """Reserve pages for requests that wait, and return them: what the cache has of them can be sent at once.

        In order of arrival. One that does not fit is overtaken by those that do, until it is too old for that.
        """
        admitted = []
        for request in list(self.waiting):
            if len(self.running) + len(self.leaving) >= self.max_running:
                break
            if self._reserve(request):
                self.waiting.remove(request)
                self._enter(request)
                admitted.append(request)
            elif self._is_old(request, at):
                break
        return admitted

    def plan_step(self, at: int) -> list[Chunk]:
        """Return the next pass's chunks; empty when there is nothing to compute."""
        by_arrival = sorted(self.running, key=lambda each: each.number)
        old = [request for request in by_arrival if self._is_old(request, at)]
        young = [request for request in by_arrival if not self._is_old(request, at)]
        young.sort(key=lambda each: each.remaining)
        for_young = min(self.chunk_size // 2, sum(each.remaining for each in young))
        chunks = self._cut(old, self.chunk_size - for_young)
        chunks += self._cut(young, self.chunk_size - sum(chunk.tokens for chunk in chunks))
        return chunks

    def _cut(self, requests: list[Request], budget: int) -> list[Chunk]:
        """Cut chunks of at most `budget` tokens together, in the given order."""
        chunks = []
        for request in requests:
            if not budget:
                break
            count = min(budget, request.remaining)
            budget -= count
            request.in_step = True
            chunks.append(Chunk(request, request.computed, count))
        return chunks

    def _is_old(self, request: Request, at: int) -> bool:
        return at - request.timeline.received >= self.age_limit_ns

    def _reserve(self, request: Request) -> bool:
        """Take all pages of a prompt, or none."""
        layout = self.layout
        if not request.hashes:
            tokens, salt = request.order.tokens, request.order.cache_salt
            request.hashes = block_hashes(tokens, layout.page_size, layout.model, salt)
        # A hidden state is in no page: where one is wanted, the page of the last token is computed again.
        usable = (request.length - (request.order.context is not None)) // layout.page_size
        found = self.allocator.find(request.hashes[:usable])
        missing = layout.pages_for(request.length) - len(found)
        if not self.allocator.can_allocate(missing, found):
            return False
        request.pages = self.allocator.claim(found, missing)
        request.held = request.published = len(found)
        request.computed = request.timeline.cached = len(found) * layout.page_size
        return True

    def _enter(self, request: Request) -> None:
        request.machine.move(State.RUNNING)
        if request.remaining:
            self.running.append(request)
        else:
            request.machine.move(State.DRAINING)
            self.leaving.add(request)

    def finish_step(self, chunks: list[Chunk]) -> None:
        """The chunks' KV is in the pool. Requests whose last chunk it was wait for their writes now."""
        for chunk in chunks:
            request = chunk.request
            request.in_step = False
            if request.state is not State.RUNNING:
                continue
            request.computed = chunk.end
            self._publish(request)
            if chunk.last:
                self.running.remove(request)
                self.leaving.add(request)
                request.machine.move(State.DRAINING)

    def _publish(self, request: Request) -> None:
        """Let others find the pages that are full by now."""
        first, full = request.published, request.computed // self.layout.page_size
        self.allocator.publish(request.pages[first:full], request.hashes[first:full])
        request.published = max(first, full)

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
