"""Messages that a prefiller receives from decoders."""

from typing import Annotated

import msgspec

from kvferry_proto.immediate import MAX_GENERATIONS, MAX_SLOTS
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.memory import MemoryDescriptor
from kvferry_proto.message import Message, RequestId

SlotNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
Generation = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GENERATIONS)]


class Prefill(Message):
    """Decoder -> prefiller: compute the KV of these tokens and write it into my pages, layer by layer.

    Answered by nothing when all goes well: the decoder counts the immediates of the writes. PrefillReport follows
    for the books; PrefillFailed if it can't be done.
    """

    request_id: RequestId
    tokens: Int32s
    """Every token whose KV is wanted: the prompt without its last token."""
    pages: Int32s
    """Destination page of each page of the tokens, in order."""
    slot: SlotNumber
    generation: Generation
    layout: KVLayout
    """The decoder's sharding."""
    memory: list[MemoryDescriptor]
    """The decoder's KV pool, one region per rank."""
    checksums: bool = False
    """Send the checksums of all pages with the report."""


class CancelPrefill(Message):
    """Decoder -> prefiller: stop. Always answered by CancelConfirmed, also when the request is unknown or over."""

    request_id: RequestId
    slot: SlotNumber
    generation: Generation


ToPrefiller = Prefill | CancelPrefill
