"""Continuous batching on the decoder: who waits, who receives, who runs in the next step.

A running request has tokens whose KV is missing: one, its last, if it is decoding; more if the decoder prefills for
it (a short prompt, or a preempted request whose KV is computed again). Decoding requests all run in every step;
prefills share a token budget, first come first served, so that a step stays short.

Pages are reserved for all of a request's tokens before it is accepted, and one at a time while it answers. Full pages
that the prefix cache has are shared and not asked for; a request's own are published when their KV is complete, so a
chat's next turn finds the answer's pages too. When the pool is empty the request that came last gives its pages up and
waits to be computed again: it can't hang, since a request alone fits by admission.

Drafts come last: they get the pages that nobody else needs, and give them back before anybody is preempted.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry_engine.prefix_cache import PrefixCache
from kvferry_proto.layout import KVLayout

from kvferry_decoder.pages import RequestPages
from kvferry_decoder.request import Request, State
from kvferry_decoder.speculation import Speculation


class StepSlice(NamedTuple):
    """One request's share of a step."""

    request: Request
    start: int
    tokens: int
    drafts: Sequence[int] = ()
    """Guesses that are computed after the tokens; only where the slice draws."""
    further: int = 0
    """Tokens that the drafting layer is to guess after the step."""

    @property
    def draws(self) -> bool:
        """Whether the slice reaches the request's last token, so that the next one is drawn."""
        return self.start + self.tokens == len(self.request.tokens)


class Scheduler:
    """Owns the requests of a decoder and their pages. Pure bookkeeping: no clock, no socket, no tensor."""

    def __init__(
        self,
        allocator: PrefixCache,
        layout: KVLayout,
        *,
        max_running: int,
        max_waiting: int,
        prefill_budget: int,
        local_prefill: int = 0,
        speculation: Speculation | None = None,
    ) -> None:
        """`local_prefill`: what is missing after a hit is computed here if it is at most so many tokens."""
        self.pages = RequestPages(allocator, layout)
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.prefill_budget = prefill_budget
        self.local_prefill = local_prefill
        self.speculation = speculation or Speculation()
        self.waiting: deque[Request] = deque()
        self.receiving: set[Request] = set()
        self.running: list[Request] = []
        self.leaving: set[Request] = set()
        """Requests that have ended while a step uses their pages."""
        self.preemptions = 0

    @property
    def requests(self) -> Iterable[Request]:
        """Every request that has not ended."""
        return [*self.waiting, *self.receiving, *self.running]

    # --- entry -----------------------------------------------------------------------------------------------

    def can_add(self) -> bool:
        """Whether the queue has a place."""
        return len(self.waiting) < self.max_waiting

    def add(self, request: Request) -> None:
        """Put a request at the queue's end."""
        self.waiting.append(request)

    def admit(self, can_receive: bool) -> list[Request]:
        """Move requests from the queue's head to RECEIVING or RUNNING, their pages reserved, and return them.

        `can_receive`: whether a transfer slot can be drawn. Stops at the first that does not fit, so that a long
        prompt isn't overtaken for ever.
        """
        admitted = []
        while self.waiting:
            request = self.waiting[0]
            found = self.pages.find(request)
            receives = self._receives(request, len(found))
            if not self._fits(request, found) or (receives and not can_receive):
                break
            self.waiting.popleft()
            self.pages.reserve(request, found)
            self._enter(request, receives)
            admitted.append(request)
            if receives:
                break  # the caller draws the slot and tells us whether another is left
        return admitted

    def _receives(self, request: Request, held: int) -> bool:
        """Whether its prefiller is asked for what is missing."""
        missing = len(request.tokens) - 1 - held * self.pages.layout.page_size
        if request.prefiller is None or missing == 0:
            return False
        return not held or missing > self.local_prefill

    def _fits(self, request: Request, found: list[int]) -> bool:
        active = len(self.running) + len(self.receiving)
        if active >= self.max_running:
            return False
        # One page of growth for everyone who runs: whoever is admitted must not cause a preemption at once.
        return self.pages.can_reserve(request, found, beside=active)

    def _enter(self, request: Request, receives: bool) -> None:
        if receives:
            request.machine.move(State.RECEIVING)
            self.receiving.add(request)
            return
        request.spared, request.prefiller = request.prefiller is not None, None
        # A request that was preempted has been computed once: what is found then is its own.
        request.cached = 0 if request.accepted else request.computed
        request.machine.move(State.RUNNING)
        self.running.append(request)

    def arrived(self, request: Request) -> None:
        """All pages of the prompt but for its last token's KV are here: join the batch."""
        self.receiving.remove(request)
        request.machine.move(State.RUNNING)
        request.computed = len(request.tokens) - 1
        self.running.append(request)
        self.pages.publish(request)

    # --- the step --------------------------------------------------------------------------------------------

    def plan_step(self) -> list[StepSlice]:
        """Return the next step's slices, pages for them reserved; may preempt. Empty when there is nothing to do."""
        slices = []
        budget = self.prefill_budget
        # In order of arrival: the victim of a preemption always comes later, so its slice isn't planned yet.
        for request in sorted(self.running, key=lambda r: r.order):
            if request.state is not State.RUNNING or (request.uncomputed > 1 and budget == 0):
                continue
            count = 1 if request.uncomputed == 1 else min(request.uncomputed, budget)
            if not self._grow(request, request.computed + count):
                continue
            if request.uncomputed > 1:
                budget -= count
            slices.append(StepSlice(request, request.computed, count))
            request.in_step = True
        share = self.speculation.share(sum(piece.draws for piece in slices))
        return [self._with_drafts(piece, share) if piece.draws else piece for piece in slices] if share else slices

    def _with_drafts(self, piece: StepSlice, share: int) -> StepSlice:
        """Add up to `share` drafts, as many as there are pages for, and the same of further guesses."""
        request, end = piece.request, piece.start + piece.tokens
        drafts = self.speculation.drafts(request, share)
        further = self.speculation.further(request, share, len(drafts))
        # The first guess is made at the last token's position, each other one at a position further.
        self.pages.grow(request, end + len(drafts) + max(0, further - 1))
        room = self.pages.room(request) - end
        drafts = drafts[:room]
        return piece._replace(drafts=drafts, further=min(further, room - len(drafts) + 1))

    def finish_step(self, slices: list[StepSlice]) -> None:
        """The step's KV is in the pool, that of drafts aside. Requests that ended meanwhile give their pages up now."""
        for request, _, count, *_ in slices:
            request.in_step = False
            if request.state is State.RUNNING:
                request.computed += count
                self.pages.publish(request)
            else:
                self._leave(request)

    def accept(self, request: Request, drafts: int) -> None:
        """So many drafts of the last step were right, and are tokens of the request by now: their KV is there."""
        if drafts:
            request.computed += drafts
            self.pages.publish(request)

    def give_up_step(self, slices: list[StepSlice]) -> None:
        """The step broke: nothing of it counts. Requests that ended meanwhile give their pages up now."""
        for request, *_ in slices:
            request.in_step = False
            if request.state is not State.RUNNING:
                self._leave(request)

    def _grow(self, request: Request, tokens: int) -> bool:
        """Reserve pages up to `tokens`; True unless `request` itself had to be preempted."""
        if self.pages.grow(request, tokens):
            return True
        for drafting in self.running:
            self.pages.trim(drafting)
        while not self.pages.grow(request, tokens):
            victim = max(self.running, key=lambda r: r.order)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self.pages.free(victim)
        victim.machine.move(State.WAITING)
        victim.computed = victim.held = victim.published = 0
        victim.prefiller = victim.context = None
        self.waiting.appendleft(victim)

    # --- exits -----------------------------------------------------------------------------------------------

    def end(self, request: Request, state: State) -> None:
        """Take a request out for good.

        Its pages are freed, after the step if one is using them. Pages that a prefiller may still write to are the
        receiver's to take away first (`RequestPages.surrender`).
        """
        self._remove(request)
        request.machine.move(state)
        if request.in_step:
            self.leaving.add(request)
        else:
            self.pages.free(request)

    def _leave(self, request: Request) -> None:
        self.leaving.remove(request)
        self.pages.free(request)

    def _remove(self, request: Request) -> None:
        match request.state:
            case State.COMPILING:
                pass  # not added yet
            case State.WAITING:
                self.waiting.remove(request)
            case State.RECEIVING:
                self.receiving.remove(request)
            case State.RUNNING:
                self.running.remove(request)
