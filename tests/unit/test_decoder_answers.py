"""What a step tells routers: however many requests ran in it, every message can be sent."""

from types import SimpleNamespace

from kvferry_decoder.answers import Answers, DrawnRun
from kvferry_proto.codec import encode
from kvferry_proto.nodes import NodeRef
from kvferry_proto.to_router import TokenLogprobs


def test_a_step_of_very_many_requests_with_all_log_probabilities_is_told_in_several_messages():
    told = []

    def reply(message):
        encode(NodeRef("d", 1), message)
        told.extend((run.request_id, run.count) for run in message.runs)
        assert sum(run.count for run in message.runs) == len(message.token_ids)

    origin = SimpleNamespace(key=b"r", sender=NodeRef("r", 1), reply=reply)
    top = [(100_000 + place, -12.345678901234567) for place in range(20)]
    drawn = [
        DrawnRun(SimpleNamespace(id=f"router-1234567890abcdef-{number}", origin=origin), [7], [top_of(top)], None)
        for number in range(3000)
    ]
    Answers().step(drawn)
    assert told == [(entry.request.id, 1) for entry in drawn]


def top_of(top):
    """A token with its alternatives."""
    return TokenLogprobs(7, -0.123456789012345, top)
