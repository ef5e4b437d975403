"""Messages that a router receives: from clients, and from decoders."""

from typing import Annotated

import msgspec

from kvferry_proto.grammar import Grammar
from kvferry_proto.ints import Int32s
from kvferry_proto.message import CacheSalt, Message, Refused, RequestFailed, RequestId
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.timeline import DecodeTimeline, PrefillTimeline
from kvferry_proto.usage import FinishReason, Usage

ClientId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat."""

    role: str
    content: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: of the token drawn, and of the likeliest tokens."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


# --- from clients -----------------------------------------------------------------------------------------------


class Generate(Message):
    """Client -> router: answer a prompt. Exactly one of `prompt`, `messages`, `prompt_ids` is given."""

    id: ClientId
    """The client's own name for the request; unique among those it has open on this socket."""
    model: str = ""
    """"" takes whatever is served."""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    prompt_ids: Int32s | None = None
    sampling: SamplingParams = SamplingParams()
    stop: Annotated[list[Stop], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=list)
    cache_salt: CacheSalt = ""
    """Cached KV is shared only between requests with the same one."""
    grammar: Grammar | None = None
    """What the answer must look like."""


class CancelGenerate(Message):
    """Client -> router: stop answering. Answered by Failed with code cancelled, unless the answer was complete."""

    id: ClientId


FromClient = Generate | CancelGenerate


# --- from decoders ----------------------------------------------------------------------------------------------


class Queued(Message):
    """Decoder -> router: the request is here, and waits for pages or for a place in the batch; Accepted will follow."""

    request_id: RequestId


class Accepted(Message):
    """Decoder -> router: pages and a slot are reserved; tokens will follow."""

    request_id: RequestId
    prefiller_spared: bool = False
    """A prefiller was named and is not asked: its pages are here, or little is missing."""


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """One request's share of a Tokens message: `count` ids, taken in order from the frame."""

    request_id: RequestId
    count: int
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)


class Tokens(Message):
    """Decoder -> router: what one decode step produced, for all requests of this router."""

    runs: list[TokenRun]
    token_ids: Int32s


class Finished(Message):
    """Decoder -> router: the answer is complete; the decoder holds nothing for it any more."""

    request_id: RequestId
    finish_reason: FinishReason
    usage: Usage
    decoder: DecodeTimeline
    prefiller: PrefillTimeline | None = None


class Cancelled(Message):
    """Decoder -> router: the request was stopped, at the router's wish.

    Its pages are free, or in quarantine until the prefiller confirms that nothing is in flight.
    """

    request_id: RequestId
    cached_tokens: int = 0
    """Prompt tokens that nobody computed, as in the usage of an answer that is complete."""
    decoder: DecodeTimeline = msgspec.field(default_factory=DecodeTimeline)
    prefiller: PrefillTimeline | None = None


FromDecoder = Queued | Accepted | Tokens | Finished | Cancelled | RequestFailed | Refused
ToRouter = FromClient | FromDecoder
