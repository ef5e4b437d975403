"""What has gathered for a slow client goes out in messages that can be sent, and nothing of it is lost."""

import pytest
from kvferry_proto.codec import encode
from kvferry_proto.nodes import NodeRef
from kvferry_proto.to_router import TokenLogprobs
from kvferry_router.deltas import deltas
from kvferry_router.job import TokenEvent

LIKELY = [(128_000 + number, -12.3456789012345678) for number in range(20)]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 5000])
@pytest.mark.parametrize("text", ["", "word", "\x00" * 300_000])
@pytest.mark.parametrize("logprobs", [False, True])
def test_all_of_it_comes_in_messages_that_can_be_sent(count, text, logprobs):
    ids = list(range(count))
    entries = [TokenLogprobs(token, -12.3456789012345678, LIKELY) for token in ids] if logprobs else []
    found = list(deltas("a", TokenEvent(token_ids=ids, text=text, logprobs=entries)))
    for delta in found:
        assert len(encode(NodeRef("router", 1), delta)[0]) < 3 << 18
        assert len(delta.logprobs) == (len(delta.token_ids) if logprobs else 0)
    assert [token for delta in found for token in delta.token_ids] == ids
    assert [entry for delta in found for entry in delta.logprobs] == entries
    assert "".join(delta.text for delta in found) == text
    assert len(found) == 1 or count > 256 or len(text) > 65536


def test_text_never_comes_before_its_ids():
    found = list(deltas("a", TokenEvent(token_ids=[1] * 600, text="x" * 70_000, logprobs=[])))
    assert [(len(delta.token_ids), len(delta.text)) for delta in found] == [(256, 0), (256, 0), (88, 65536), (0, 4464)]
