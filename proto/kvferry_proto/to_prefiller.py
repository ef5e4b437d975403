"""Messages that a prefiller receives from decoders."""

from typing import Annotated

import msgspec

from kvferry_proto.immediate import MAX_GENERATIONS, MAX_SLOTS
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.memory import MemoryDescriptor
from kvferry_proto.message import CacheSalt, Message, RequestId

SlotNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
Generation = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GENERATIONS)]


class Prefill(Message):
    """Decoder -> prefiller: write the KV of these tokens into my pages, computing what you lack, layer by layer.

    Answered by nothing when all goes well: the decoder counts the immediates of the writes. PrefillReport follows
    for the books; PrefillFailed if it can't be done.
    """

    request_id: RequestId
    tokens: Int32s
    """Every token whose KV is wanted: the prompt without its last token."""
    pages: Int32s
    """Destination page of each page of the tokens from `first_page` on, in order."""
    slot: SlotNumber
    generation: Generation
    layout: KVLayout
    """The decoder's sharding."""
    memory: list[MemoryDescriptor]
    """The decoder's KV pool, one region per rank."""
    checksums: bool = False
    """Send the checksums of all pages with the report."""
    first_page: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Pages at the beginning that the decoder holds: they are not to be sent."""
    cache_salt: CacheSalt = ""
    """Pages are shared only between requests with the same one."""
    context: MemoryDescriptor | None = None
    """The decoder's context slots, a hidden state for each transfer slot. The state after the last of `tokens` is then
    written there, as one page arrival more: the decoder drafts from it. None: nobody wants it."""


class CancelPrefill(Message):
    """Decoder -> prefiller: stop. Always answered by CancelConfirmed, also when the request is unknown or over."""

    request_id: RequestId
    slot: SlotNumber
    generation: Generation


ToPrefiller = Prefill | CancelPrefill
