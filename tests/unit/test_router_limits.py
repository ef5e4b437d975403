"""What a prompt that is too long is told to be too long for."""

import msgspec
import pytest
from kvferry_proto.errors import ErrorCode
from kvferry_proto.nodes import NodeRecord, NodeRef, Role
from kvferry_router.bad_request import BadRequest
from kvferry_router.limits import Limits
from scripted import LAYOUT

LARGE = NodeRecord(
    ref=NodeRef("d1", 1), role=Role.DECODER, endpoint="", layout=LAYOUT, total_pages=1000, max_context=256
)
# A decoder's own word is the smaller of the two.
SMALL = msgspec.structs.replace(LARGE, ref=NodeRef("d2", 1), total_pages=8, max_context=32)
EXACT = msgspec.structs.replace(LARGE, total_pages=64)
CONTEXT = "this model's context of 256 tokens must"
MEMORY = "KV memory of 32 tokens (--kv-memory; this model's own context is 256) must"


@pytest.mark.parametrize(
    ("decoders", "room", "words"),
    [([], 256, CONTEXT), ([LARGE], 256, CONTEXT), ([EXACT], 256, CONTEXT), ([LARGE, SMALL], 32, MEMORY)],
)
def test_what_is_too_short_is_named(decoders, room, words):
    limits = Limits(lambda: decoders, 256)
    assert limits.answer_tokens(room - 3, None, 16) == 3
    for prompt, asked, field in ((room, None, "messages"), (room - 3, 4, "max_completion_tokens")):
        with pytest.raises(BadRequest) as caught:
            limits.answer_tokens(prompt, asked, 16, "messages", "max_completion_tokens")
        error = caught.value.error
        assert (error.code, error.param) == (ErrorCode.PROMPT_TOO_LONG, field)
        assert words in error.message
        assert "max_tokens" not in error.message
