"""Messages that clients receive from a router."""

import msgspec

from kvferry_proto.errors import RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Message, Refused
from kvferry_proto.timeline import Timeline
from kvferry_proto.to_router import TokenLogprobs
from kvferry_proto.usage import FinishReason, Usage


class Delta(Message):
    """A piece of the answer. Text may lag behind the ids: a character can need several tokens."""

    id: str
    text: str
    token_ids: Int32s
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)


class Completed(Message):
    """The answer is complete."""

    id: str
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline
    model: str


class Failed(Message):
    """There will be no (more) answer."""

    id: str
    error: RequestError


ToClient = Delta | Completed | Failed | Refused
