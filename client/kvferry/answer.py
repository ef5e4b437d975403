"""What comes back: pieces of an answer, and the whole of it."""

import msgspec
from kvferry_proto.timeline import Timeline, summary_ms
from kvferry_proto.to_router import TokenLogprobs
from kvferry_proto.usage import FinishReason, Usage


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer. Text may lag behind the ids: a character can need several tokens."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    """One entry per token id if the request asked for them, else empty."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    """The client's name for the request."""
    model: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline
    """Monotonic nanoseconds as each node saw them."""

    def phases_ms(self) -> dict[str, float]:
        """Where the milliseconds went: see `kvferry_proto.timeline.summary_ms`."""
        return summary_ms(self.timeline)
