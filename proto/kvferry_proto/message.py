"""Base of every message, and the names that messages share."""

from typing import Annotated

import msgspec

from kvferry_proto.errors import RequestError
from kvferry_proto.timeline import DecodeTimeline, PrefillTimeline

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
"""Drawn by the router, one per attempt; what clients call their requests never leaves the router."""

CacheSalt = Annotated[str, msgspec.Meta(max_length=256)]
"""Keeps the cached pages of adapters and tenants apart: it goes into every block hash."""


class Message(msgspec.Struct, kw_only=True, tag_field="type"):
    """A wire message. Its type travels in the field `type`."""


class Refused(Message):
    """Any node -> sender: what you sent could not be read or taken. Nothing was done."""

    reason: str
    """One word: size, json, type, stale, unexpected, internal, or an ErrorCode."""
    detail: str
    about: str = ""
    """The request (its request_id, or a client's id) that the refused message was about, where that could be read."""


class RequestFailed(Message):
    """The request (this attempt of it) is over, and why. Its sender holds nothing for it any more."""

    request_id: RequestId
    error: RequestError
    decoder: DecodeTimeline = msgspec.field(default_factory=DecodeTimeline)
    prefiller: PrefillTimeline | None = None
