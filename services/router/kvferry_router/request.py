"""A request as the router carries it: one state machine, from the first placement to the books."""

import asyncio
import enum
from collections.abc import Sequence

import msgspec
from kvferry_node.states import StateMachine
from kvferry_proto.errors import KvferryError, Phase, RequestError
from kvferry_proto.message import RequestFailed
from kvferry_proto.timeline import DecodeTimeline, PrefillTimeline, RouterTimeline, Timeline, now
from kvferry_proto.to_router import Cancelled, Finished, TokenLogprobs
from kvferry_proto.usage import FinishReason, Usage

from kvferry_router.answer import GrowingAnswer
from kvferry_router.job import Job, Outcome

LastWord = Cancelled | Finished | RequestFailed
"""What a decoder says when it holds nothing of an attempt any more."""


class State(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    """To be placed: at first, and again after a lost attempt."""
    ASSIGNED = "assigned"
    """Assign was sent; the decoder has not answered."""
    RUNNING = "running"
    """The decoder has accepted."""
    FINISHED = "finished"
    FAILED = "failed"


TRANSITIONS: dict[State, frozenset[State]] = {
    # A lost attempt may turn out to have streamed the whole answer: hence WAITING -> FINISHED.
    State.WAITING: frozenset({State.ASSIGNED, State.FINISHED, State.FAILED}),
    State.ASSIGNED: frozenset({State.RUNNING, State.WAITING, State.FINISHED, State.FAILED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED, State.FAILED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}


class Request:
    """One prompt on its way. Its reader waits on `changed`; its carrier moves the state."""

    def __init__(self, job: Job, answer: GrowingAnswer, name: str = "") -> None:
        """`name`: what the client knows it by, for the log."""
        self.job = job
        self.name = name
        self.answer = answer
        self._machine = StateMachine(State.WAITING, TRANSITIONS)
        self.changed = asyncio.Event()
        """Tokens came, or the end."""
        self.ended = asyncio.Event()
        self.timeline = RouterTimeline(received=job.received)
        self.id = ""
        """Internal id of the present attempt."""
        self.nodes: list[str] = []
        """Its decoder, and its prefiller where one is asked."""
        self.word: LastWord | None = None
        """What its decoder said last of the present attempt."""
        self.outcome: Outcome | None = None
        self.error: RequestError | None = None

    @property
    def state(self) -> State:
        """Where it is."""
        return self._machine.state

    @property
    def over(self) -> bool:
        """Nothing will come any more."""
        return self._machine.final

    @property
    def phase(self) -> Phase:
        """What an error that comes from outside (a deadline, a lost node) interrupts."""
        match self.state:
            case State.ASSIGNED:
                return Phase.ASSIGN
            case State.RUNNING:
                return Phase.DECODE if self.answer.token_ids else Phase.PREFILL
            case _:
                return Phase.ROUTE

    def assigned(self, attempt_id: str, number: int, nodes: list[str]) -> None:
        """Assign is on its way to the first of `nodes`; `number` counts attempts from 1."""
        self._machine.move(State.ASSIGNED)
        self.id, self.nodes, self.word = attempt_id, nodes, None
        self.timeline.placed = now()
        self.timeline.attempts = number

    def accepted(self) -> None:
        """The decoder took it."""
        self._machine.move(State.RUNNING)
        self.timeline.accepted = now()

    def heard(self, word: LastWord) -> None:
        """Keep a decoder's last word if it is about the present attempt; it may come after the end."""
        if word.request_id == self.id:
            self.word = word

    def lost(self) -> None:
        """The attempt is over, the request is not."""
        self._machine.move(State.WAITING)

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Tokens came."""
        self.timeline.first_token = self.timeline.first_token or now()
        self.answer.add(ids, logprobs)
        self.changed.set()

    def finish(
        self, reason: FinishReason, cached: int = 0, *, decoder: DecodeTimeline, prefiller: PrefillTimeline | None
    ) -> None:
        """The answer is complete; `cached`: prompt tokens that nobody computed."""
        self._machine.move(State.FINISHED)
        self.timeline.finished = now()
        self.answer.end()
        prompt = len(self.job.tokens)
        self.outcome = Outcome(
            finish_reason=reason,
            # Counted here: a decoder that took over half-way has seen a part of the answer as prompt.
            usage=Usage(
                prompt_tokens=prompt,
                completion_tokens=len(self.answer.token_ids),
                cached_tokens=max(0, min(cached, prompt)),
                accepted_prediction_tokens=max(0, decoder.accepted),
                rejected_prediction_tokens=max(0, decoder.drafted - decoder.accepted),
            ),
            timeline=Timeline(router=self.timeline, decoder=decoder, prefiller=prefiller),
            request_id=self.id,
        )
        self._wake()

    def fail(self, error: RequestError) -> None:
        """There will be no (more) answer."""
        self._machine.move(State.FAILED)
        self.timeline.finished = now()
        # Decoders know the grammar, and not what it was made of.
        own = error.param == "grammar"
        self.error = msgspec.structs.replace(error, param=self.job.grammar_field) if own else error
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.ended.set()

    def result(self) -> Outcome:
        """Return how it ended. Raises KvferryError if it failed."""
        if self.error is not None:
            raise KvferryError(self.error)
        if self.outcome is None:
            msg = f"request {self.id} is not over"
            raise RuntimeError(msg)
        return self.outcome
