"""What a prompt that is too long is told to be too long for."""

import msgspec
import pytest
from kvferry_proto.codec import encode
from kvferry_proto.errors import ErrorCode
from kvferry_proto.ints import Int32s
from kvferry_proto.nodes import NodeRecord, NodeRef, Role
from kvferry_proto.page_table import PageEntry, Source, pack
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_decoder import Assign
from kvferry_router.bad_request import BadRequest
from kvferry_router.limits import MESSAGE_TOKENS, Limits
from scripted import LAYOUT

LARGE = NodeRecord(
    ref=NodeRef("d1", 1), role=Role.DECODER, endpoint="", layout=LAYOUT, total_pages=1000, max_context=256
)
# A decoder's own word is the smaller of the two.
SMALL = msgspec.structs.replace(LARGE, ref=NodeRef("d2", 1), total_pages=8, max_context=32)
EXACT = msgspec.structs.replace(LARGE, total_pages=64)
CONTEXT = "this model's context of 256 tokens must"
BOUNDLESS = msgspec.structs.replace(LARGE, total_pages=1 << 24, max_context=1 << 26)
TINY_PAGES = msgspec.structs.replace(BOUNDLESS, layout=msgspec.structs.replace(LAYOUT, page_size=1))
MESSAGE = "a message between nodes, of at most 1048576 tokens, must"
MEMORY = "KV memory of 32 tokens (--kv-memory; this model's own context is 256) must"


@pytest.mark.parametrize(
    ("decoders", "trained", "room", "words"),
    [
        ([], 256, 256, CONTEXT),
        ([LARGE], 256, 256, CONTEXT),
        ([EXACT], 256, 256, CONTEXT),
        ([LARGE, SMALL], 256, 32, MEMORY),
        ([BOUNDLESS], 1 << 26, 1 << 20, MESSAGE),
        ([TINY_PAGES], 1 << 26, 349525, MESSAGE.replace("1048576", "349525")),
        ([], 1 << 26, 1 << 20, MESSAGE),
        ([], 0, 1 << 20, MESSAGE),
    ],
)
def test_what_is_too_short_is_named(decoders, trained, room, words):
    limits = Limits(lambda: decoders, trained)
    assert limits.answer_tokens(room - 3, None, 16) == 3
    for prompt, asked, field in ((room, None, "messages"), (room - 3, 4, "max_completion_tokens")):
        with pytest.raises(BadRequest) as caught:
            limits.answer_tokens(prompt, asked, 16, "messages", "max_completion_tokens")
        error = caught.value.error
        assert (error.code, error.param) == (ErrorCode.PROMPT_TOO_LONG, field)
        assert words in error.message
        assert "max_tokens" not in error.message


def test_an_assignment_of_as_many_tokens_as_are_taken_can_be_sent():
    tokens = Int32s([7] * MESSAGE_TOKENS)
    table = pack([PageEntry(1, Source.PREFILLER)] * (MESSAGE_TOKENS // LAYOUT.page_size))
    assign = Assign(request_id="r", tokens=tokens, page_table=table, sampling=SamplingParams(), stop_token_ids=[])
    assert len(encode(NodeRef("r", 1), assign)[1]) == 4 << 20
