"""Whom a request is given to: the rule of placement.lua in Python, for when Redis is away.

Both must choose alike; a test holds them to it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role

from kvferry_node.registry import pairing


class PlacementAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs."""

    request_id: str
    tokens: int
    """Prompt tokens (and tokens already answered, where a request moves); the last one is never prefilled."""
    pages: int
    """KV pages on the decoder: of the prompt, and some for the answer."""
    model: str
    context: int = 0
    """Tokens of prompt and answer together, against max_context; 0: not checked."""
    exclude: frozenset[NodeRef] = frozenset()
    """Lives of nodes that have failed this request; a node that was restarted since may have it."""
    local_prefill: bool = False
    """Whether a decoder may prefill it by itself, however long, when no prefiller is there."""
    held: dict[str, int] = {}
    """Node id: how many of the tokens, from the first on, are probably in its prefix cache."""
    affinity: float = 0.0
    """How many requests more than others a decoder that holds the whole prompt may have and be chosen still."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens whose KV somebody has to compute."""
        return max(0, self.tokens - 1)

    def credit(self, node_id: str) -> float:
        """Requests that what a decoder holds makes up for."""
        return self.affinity * self.held.get(node_id, 0) / self.tokens


class Candidate(NamedTuple):
    """A node as placement sees it: what it is, what it told, and what is reserved on it beyond that."""

    record: NodeRecord
    load: Load
    requests: int = 0
    pages: int = 0
    tokens: int = 0

    @property
    def busy(self) -> int:
        """Requests that it has or is about to get."""
        return self.load.running + self.load.waiting + self.requests

    @property
    def free(self) -> int:
        """Pages that are neither taken nor reserved."""
        return self.load.free_pages - self.pages

    @property
    def has_place(self) -> bool:
        """Whether it takes another request; 0 places means that it sets no limit."""
        places = self.record.max_running + self.record.max_waiting
        return places == 0 or self.busy < places


class Choice(NamedTuple):
    """Who takes the request; prefiller None: the decoder prefills by itself."""

    decoder: NodeRecord
    prefiller: NodeRecord | None


class Unplaced(NamedTuple):
    """Why nobody takes it: "no_nodes", "overloaded" or "too_large", and which role is short of what."""

    why: str
    role: Role
    most: int = 0
    """too_large: pages of the largest decoder."""


def choose(ask: PlacementAsk, nodes: Iterable[Candidate]) -> Choice | Unplaced:
    """Pick the decoder with the fewest requests that has the pages, and its least loaded prefiller.

    What a node holds of the prompt already counts in its favour.
    """
    able = [node for node in nodes if _serves(node.record, ask)]
    decoders = [node for node in able if node.record.role == Role.DECODER]
    prefillers = [node for node in able if node.record.role == Role.PREFILLER]
    if not decoders:
        return Unplaced("no_nodes", Role.DECODER)
    largest = max(node.record.total_pages for node in decoders)
    if ask.pages > largest:
        return Unplaced("too_large", Role.DECODER, largest)
    able = [node for node in decoders if node.free >= ask.pages and node.has_place]
    ready = sorted(able, key=lambda node: _decoder_cost(ask, node))
    if not ready:
        return Unplaced("overloaded", Role.DECODER)
    return _with_prefiller(ask, ready, prefillers)


def _with_prefiller(ask: PlacementAsk, decoders: list[Candidate], prefillers: list[Candidate]) -> Choice | Unplaced:
    full = False
    for decoder in decoders:
        if ask.prefill_tokens <= decoder.record.local_prefill_tokens:
            return Choice(decoder.record, None)
        pair = [node for node in prefillers if pairing(node.record) == pairing(decoder.record)]
        ready = [node for node in pair if node.has_place]
        if ready:
            return Choice(decoder.record, min(ready, key=lambda node: _prefiller_cost(ask, node)).record)
        full = full or bool(pair)
    if full:
        return Unplaced("overloaded", Role.PREFILLER)
    if ask.local_prefill:
        return Choice(decoders[0].record, None)
    return Unplaced("no_nodes", Role.PREFILLER)


def _serves(record: NodeRecord, ask: PlacementAsk) -> bool:
    fits = record.max_context == 0 or ask.context <= record.max_context
    return fits and not record.draining and record.model == ask.model and record.ref not in ask.exclude


def _decoder_cost(ask: PlacementAsk, node: Candidate) -> tuple[float, int, str]:
    return node.busy - ask.credit(node.record.ref.id), -node.free, node.record.ref.id


def _prefiller_cost(ask: PlacementAsk, node: Candidate) -> tuple[int, int, str]:
    node_id = node.record.ref.id
    return node.load.queued_tokens + node.tokens - ask.held.get(node_id, 0), node.busy, node_id
