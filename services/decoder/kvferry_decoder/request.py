"""A request on the decoder: its tokens, its pages, its state.

          Assign ─▶ COMPILING     the grammar of the answer, if it has one
            │           │
         WAITING ◀──────┴───────┐ preempted: pages given up, KV to be computed again here
      pages │ reserved          │
    ┌───────┴────────┐          │
RECEIVING ─────────▶ RUNNING ───┘
    │  last page        │
    ▼                   ▼
  CANCELLED · FAILED · FINISHED      (every state may end in the first two)
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from kvferry_engine.sampler import SamplingRow
from kvferry_node.channels import Origin
from kvferry_node.states import StateMachine
from kvferry_proto.nodes import Peer
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.timeline import DecodeTimeline, PrefillTimeline
from kvferry_proto.to_decoder import Assign
from kvferry_proto.usage import FinishReason

from kvferry_decoder.drawing import Drawing
from kvferry_decoder.ngram import PromptLookup


class State(enum.Enum):
    """Where a request is."""

    COMPILING = enum.auto()
    WAITING = enum.auto()
    RECEIVING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()
    CANCELLED = enum.auto()
    FAILED = enum.auto()


_ENDS = frozenset({State.CANCELLED, State.FAILED})
MOVES = {
    # The answer so far, another decoder's, may turn out to be whole.
    State.COMPILING: frozenset({State.WAITING, State.FINISHED}) | _ENDS,
    State.WAITING: frozenset({State.RECEIVING, State.RUNNING}) | _ENDS,
    State.RECEIVING: frozenset({State.RUNNING}) | _ENDS,
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}) | _ENDS,
}


@dataclass(eq=False, slots=True)
class Request:
    """One attempt to answer a prompt. Owned by the scheduler; pages are held by whoever the state names."""

    id: str
    origin: Origin
    sampling: SamplingParams
    tokens: list[int]
    """Prompt and answer so far."""
    prompt_length: int
    """Tokens that the assignment brought (the prompt, and what another decoder had answered)."""
    answered: int
    stop_token_ids: frozenset[int]
    prefiller: Peer | None
    order: int
    """Arrival number: who came later is preempted first."""
    drawing: Drawing
    cache_salt: str = ""
    computed: int = 0
    """Tokens whose KV is in the pages."""
    pages: list[int] = field(default_factory=list)
    held: int = 0
    """Pages at the beginning that were here already when pages were reserved. They are shared, and never written to."""
    published: int = 0
    """Pages at the beginning that others may find: the held ones, and those that are full by now."""
    hashes: list[int] = field(default_factory=list)
    """Block hashes of the first full pages of the tokens, as far as they were asked for."""
    cached: int = 0
    """Prompt tokens whose KV nobody had to compute, as far as this decoder knows."""
    machine: StateMachine[State] = field(default_factory=lambda: StateMachine(State.WAITING, MOVES))
    in_step: bool = False
    """A forward pass is reading and writing its pages right now: they can't be freed before it returns."""
    queued: bool = False
    """Its router was told that it waits."""
    accepted: bool = False
    spared: bool = False
    """A prefiller was named and is not asked."""
    asked: bool = False
    """A prefiller was asked, and reports when it is through."""
    lookup: PromptLookup | None = None
    """Index of the tokens, where they are looked up for drafts."""
    guesses: Sequence[int] = ()
    """What the drafting layer said of the tokens that come next."""
    context: torch.Tensor | None = None
    """Hidden state of the last position that a prefiller computed, [E], until it is drafted from."""
    timeline: DecodeTimeline = field(default_factory=DecodeTimeline)
    prefill_timeline: PrefillTimeline | None = None

    @classmethod
    def from_assign(cls, assign: Assign, origin: Origin, order: int) -> "Request":
        """Take an assignment. Nothing is reserved yet."""
        prompt = len(assign.tokens) - assign.answered
        return cls(
            id=assign.request_id,
            origin=origin,
            sampling=assign.sampling,
            tokens=list(assign.tokens),
            prompt_length=len(assign.tokens),
            answered=assign.answered,
            stop_token_ids=frozenset(assign.stop_token_ids),
            # One token has nothing to prefill, whoever was placed.
            prefiller=assign.prefiller if len(assign.tokens) > 1 else None,
            order=order,
            drawing=Drawing(assign.sampling, assign.tokens[:prompt], assign.tokens[prompt:]),
            cache_salt=assign.cache_salt,
            machine=StateMachine(State.WAITING if assign.grammar is None else State.COMPILING, MOVES),
        )

    @property
    def state(self) -> State:
        """Present state."""
        return self.machine.state

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is missing; 1 for a request that is plainly decoding."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens drawn in this attempt."""
        return len(self.tokens) - self.prompt_length

    def note(self, report: PrefillTimeline) -> None:
        """Take what the prefiller says of its part."""
        self.prefill_timeline = report
        self.cached = report.cached

    def room(self, max_context: int) -> int:
        """Tokens that may still be drawn."""
        return min(self.sampling.max_tokens - self.generated, max_context - len(self.tokens))

    def rows(self, drafts: Sequence[int]) -> list[SamplingRow]:
        """Copy what drawing the next token needs, and those after each of `drafts`."""
        return self.drawing.rows(len(self.tokens), drafts)

    def ends_with(self, token: int) -> bool:
        """Whether the answer ends when this token is drawn."""
        return token in self.stop_token_ids and not self.sampling.ignore_eos

    def append(self, token: int, max_context: int) -> FinishReason | None:
        """Add a drawn token; return why the answer ends with it, or None. Raises GrammarError if that forbids it."""
        self.tokens.append(token)
        self.drawing.add(token)
        if self.drawing.complete or self.ends_with(token):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.room(max_context) <= 0 else None

    def extend(self, tokens: Sequence[int], max_context: int) -> tuple[int, FinishReason | None]:
        """Append tokens up to one that ends the answer; return how many, and why it ends or None. Raises as append."""
        for count, token in enumerate(tokens, 1):
            if (finish := self.append(token, max_context)) is not None:
                return count, finish
        return len(tokens), None
