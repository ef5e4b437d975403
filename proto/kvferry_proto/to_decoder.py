"""Messages that a decoder receives: from routers, and from prefillers."""

import msgspec

from kvferry_proto.errors import RequestError
from kvferry_proto.grammar import Grammar
from kvferry_proto.ints import Int32s
from kvferry_proto.message import CacheSalt, Message, Refused, RequestId
from kvferry_proto.nodes import Peer
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.timeline import PrefillTimeline


class Assign(Message):
    """Router -> decoder: answer this prompt. Answered by Queued, Accepted or RequestFailed."""

    request_id: RequestId
    tokens: Int32s
    """The prompt, and what was already streamed of the answer if another decoder had begun it."""
    page_table: Int32s
    """One entry per page of the tokens but the last: kvferry_proto.page_table."""
    sampling: SamplingParams
    stop_token_ids: list[int]
    prefiller: Peer | None = None
    """Who computes the pages that are to be sent; None: nobody, the decoder prefills by itself."""
    answered: int = 0
    """How many of `tokens` belong to the answer, not the prompt."""
    cache_salt: CacheSalt = ""
    """Pages are shared only between requests with the same one."""
    grammar: Grammar | None = None
    """What the answer must look like."""


class Cancel(Message):
    """Router -> decoder: stop. Answered by Cancelled, unless the request is over (or unknown)."""

    request_id: RequestId


class PrefillReport(Message):
    """Prefiller -> decoder: the prefill is over for me, this is how it went. For the books: nothing waits for it.

    With --verify-kv it carries the checksum of every page sent, and the decoder does wait for it.
    """

    request_id: RequestId
    slot: int
    generation: int
    timeline: PrefillTimeline
    checksums: Int32s = msgspec.field(default_factory=Int32s)
    """xxh32 of every page sent at its source, [layer][page] in page-table order; empty unless asked for."""
    context_checksum: int | None = None
    """xxh32 of the hidden state sent; None unless both are asked for."""


class CancelConfirmed(Message):
    """Prefiller -> decoder: nothing of this transfer is in flight, and nothing will be."""

    request_id: RequestId
    slot: int
    generation: int


class PrefillFailed(Message):
    """Prefiller -> decoder: the prefill can't be done, and why. Nothing of it is in flight, and nothing will be."""

    request_id: RequestId
    slot: int
    generation: int
    error: RequestError


FromRouter = Assign | Cancel
FromPrefiller = PrefillReport | CancelConfirmed | PrefillFailed | Refused
ToDecoder = FromRouter | FromPrefiller
