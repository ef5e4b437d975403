"""What a step tells routers: however many requests ran in it, every message can be sent."""

from types import SimpleNamespace

import pytest
from kvferry_decoder.answers import Answers, DrawnRun
from kvferry_decoder.request import Request
from kvferry_proto.codec import encode
from kvferry_proto.ints import Int32s
from kvferry_proto.nodes import NodeRef, Peer
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.timeline import PrefillTimeline
from kvferry_proto.to_decoder import Assign, PrefillReport
from kvferry_proto.to_router import TokenLogprobs
from kvferry_proto.usage import FinishReason


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


def asked_request(told, **fields):
    """A request whose prompt's KV a prefiller sent; what its router hears goes to `told`."""
    origin = SimpleNamespace(key=b"r", sender=NodeRef("r", 1), reply=told.append)
    assign = Assign(
        request_id="r1",
        tokens=Int32s([5] * 9),
        page_table=Int32s(),
        sampling=SamplingParams(),
        stop_token_ids=[2],
        **fields,
    )
    request = Request.from_assign(assign, origin, 0)
    request.asked = True
    return request


PREFILLER = Peer(ref=NodeRef("p", 1), endpoint="tcp://127.0.0.1:1")
REPORT = PrefillReport(request_id="r1", slot=0, generation=0, timeline=PrefillTimeline(cached=8))


@pytest.mark.parametrize("cancelled", [True, False])
def test_the_last_word_waits_for_the_report_that_says_what_was_cached(cancelled):
    told, answers = [], Answers()
    request = asked_request(told, prefiller=PREFILLER)
    if cancelled:
        answers.cancelled(request, arrived=True)
    else:
        answers.finished(request, FinishReason.LENGTH)
    answers.sweep(lambda _: True)
    assert (told, len(answers)) == ([], 1)
    answers.reported(REPORT)
    [word] = told
    assert (word.cached_tokens if cancelled else word.usage.cached_tokens) == 8
    assert word.prefiller == REPORT.timeline
    assert word.decoder.finished
    assert len(answers) == 0


def test_the_last_word_waits_for_no_prefiller_that_is_gone_or_has_given_up_or_was_not_asked():
    told, answers = [], Answers()
    answers.finished(asked_request(told, prefiller=PREFILLER), FinishReason.LENGTH)
    answers.sweep(lambda ref: ref != PREFILLER.ref)
    assert len(told) == 1
    answers.finished(asked_request(told, prefiller=PREFILLER), FinishReason.LENGTH)
    answers.without_report(REPORT.request_id)
    assert (len(told), len(answers)) == (2, 0)
    answers.cancelled(asked_request(told, prefiller=PREFILLER), arrived=False)
    request = asked_request(told)
    request.asked = False
    answers.finished(request, FinishReason.LENGTH)
    assert len(told) == 4


def top_of(top):
    """A token with its alternatives."""
    return TokenLogprobs(7, -0.123456789012345, top)
