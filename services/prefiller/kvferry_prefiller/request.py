"""A request on the prefiller: prompt, pages, the writes that are on their way.

Prefill
   │
WAITING ──pages reserved──▶ RUNNING ──last chunk computed──▶ DRAINING ──last write complete──▶ DONE
   │                          │                                 │
   └──────────────────────────┴──cancel or failure──▶ STOPPING ─┴──nothing in flight──▶ STOPPED
"""

import enum
from dataclasses import dataclass, field

from kvferry_fabric import Peer, TransferHandle
from kvferry_node.channels import Origin
from kvferry_node.states import StateMachine
from kvferry_proto.errors import RequestError
from kvferry_proto.shards import Piece
from kvferry_proto.timeline import PrefillTimeline
from kvferry_proto.to_prefiller import Prefill


class State(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()
    DONE = enum.auto()
    STOPPED = enum.auto()


MOVES = {
    State.WAITING: frozenset({State.RUNNING, State.STOPPING}),
    State.RUNNING: frozenset({State.DRAINING, State.STOPPING}),
    State.DRAINING: frozenset({State.DONE, State.STOPPING}),
    State.STOPPING: frozenset({State.STOPPED}),
}

Key = tuple[str, int, str]
"""Decoder, its incarnation, request id: what a request is called here. Two decoders never share one."""


def key_of(origin: Origin, request_id: str) -> Key:
    """Return what the request of this decoder is called here."""
    return origin.sender.id, origin.sender.incarnation, request_id


@dataclass(eq=False, slots=True)
class Request:
    """A prompt to prefill, for one decoder."""

    order: Prefill
    origin: Origin
    pieces: list[Piece]
    """The shard plan: what travels for each page of each layer."""
    peers: list[Peer] = field(default_factory=list)
    """Fabric peer of each destination rank."""
    pages: list[int] = field(default_factory=list)
    held: int = 0
    """Pages at the beginning that were in the cache when pages were reserved."""
    published: int = 0
    """Pages at the beginning that others may find: the held ones, and those that are full by now."""
    hashes: list[int] = field(default_factory=list)
    """Block hashes of the full pages."""
    context_slot: int | None = None
    """Where the hidden state after its last token is, from the last pass on, if the decoder wants it."""
    number: int = 0
    """Arrival number."""
    computed: int = 0
    """Tokens whose KV is in the pages."""
    in_step: bool = False
    """A forward pass is writing its pages right now: they can't be freed before it returns."""
    transfers: set[TransferHandle] = field(default_factory=set)
    """Transfers of the fabric that have not ended."""
    failure: RequestError | None = None
    """Why it stops, if not by the decoder's wish."""
    machine: StateMachine[State] = field(default_factory=lambda: StateMachine(State.WAITING, MOVES))
    timeline: PrefillTimeline = field(default_factory=PrefillTimeline)

    @property
    def key(self) -> Key:
        """What the request is called here."""
        return key_of(self.origin, self.order.request_id)

    @property
    def state(self) -> State:
        """Present state."""
        return self.machine.state

    @property
    def length(self) -> int:
        """Tokens to prefill."""
        return len(self.order.tokens)

    @property
    def remaining(self) -> int:
        """Tokens not yet computed."""
        return self.length - self.computed
