"""What the dispatcher takes, and what it gives back."""

import msgspec
from kvferry_proto.grammar import Grammar
from kvferry_proto.ints import Int32s
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.timeline import Timeline
from kvferry_proto.to_router import TokenLogprobs
from kvferry_proto.usage import FinishReason, Usage


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to answer."""

    tokens: Int32s
    """The prompt; not empty."""
    sampling: SamplingParams
    stop: list[str] = []
    cache_salt: str = ""
    """Keeps cached KV apart."""
    grammar: Grammar | None = None
    grammar_field: str = "grammar"
    """What the client calls the field that the grammar was made of."""
    spoken: frozenset[int] = frozenset()
    """Special tokens that are part of the answer's text all the same."""
    received: int
    """When the router got the request, in ns of `timeline.now`."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What came since the last event. Text may lag behind the ids."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    """One per id, or empty."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended well."""

    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline
    request_id: str
    """The router's own id of the last attempt: it stands in the logs of every node."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer at once."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    outcome: Outcome
