"""Time lines: clocks of several machines put into one order without changing what was measured inside a node."""

from hypothesis import given
from hypothesis import strategies as st
from kvferry_proto.codec import MAX_HEADER_BYTES, encode
from kvferry_proto.nodes import NodeRef
from kvferry_proto.timeline import (
    Chunk,
    DecodeTimeline,
    PrefillTimeline,
    RouterTimeline,
    Timeline,
    clock_id,
    now,
    summary_ms,
)
from kvferry_proto.to_decoder import PrefillReport

MS = 1_000_000


def timeline(decoder_clock: str, prefiller_clock: str, decoder_zero: int, prefiller_zero: int) -> Timeline:
    """One request, seen by clocks that began at different moments; in ms after the router received it."""
    return Timeline(
        router=RouterTimeline(
            clock="r",
            received=1000 * MS,
            placed=1001 * MS,
            accepted=1004 * MS,
            first_token=1090 * MS,
            finished=1200 * MS,
        ),
        decoder=DecodeTimeline(
            clock=decoder_clock,
            assigned=decoder_zero + 1 * MS,
            reserved=decoder_zero + 3 * MS,
            first_page=decoder_zero + 30 * MS,
            last_page=decoder_zero + 72 * MS,
            joined=decoder_zero + 75 * MS,
        ),
        prefiller=PrefillTimeline(
            clock=prefiller_clock,
            received=prefiller_zero + 3 * MS,
            chunks=[
                Chunk(prefiller_zero + 10 * MS, prefiller_zero + 40 * MS, 512),
                Chunk(prefiller_zero + 40 * MS, prefiller_zero + 69 * MS, 100),
            ],
            last_layer=prefiller_zero + 68 * MS,
            last_write=prefiller_zero + 71 * MS,
        ),
    )


EXPECTED = {
    "placed_ms": 1.0,
    "accepted_ms": 4.0,
    "first_page_ms": 30.0,
    "last_page_ms": 72.0,
    "joined_ms": 75.0,
    "prefill_started_ms": 10.0,
    "prefill_ended_ms": 69.0,
    "last_write_ms": 71.0,
    "first_token_ms": 90.0,
    "finished_ms": 200.0,
    "queued_ms": 10.0,
    "exposed_transfer_ms": 3.0,
}


def test_one_clock():
    assert summary_ms(timeline("r", "r", 1000 * MS, 1000 * MS)) == EXPECTED


@given(st.integers(1, 2**61), st.integers(1, 2**61))
def test_clocks_that_have_nothing_to_do_with_each_other(decoder_zero, prefiller_zero):
    assert summary_ms(timeline("d", "p", decoder_zero, prefiller_zero)) == EXPECTED
    assert summary_ms(timeline("r", "p", 1000 * MS, prefiller_zero)) == EXPECTED
    assert summary_ms(timeline("d", "d", decoder_zero, decoder_zero)) == EXPECTED


def test_prefiller_on_the_routers_machine_and_decoder_elsewhere():
    assert summary_ms(timeline("d", "r", 77 * MS, 1000 * MS)) == EXPECTED


def test_request_that_no_prefiller_took_part_in():
    it = Timeline(
        router=RouterTimeline(received=10 * MS, placed=11 * MS, first_token=20 * MS),
        decoder=DecodeTimeline(assigned=12 * MS, joined=15 * MS),
    )
    assert summary_ms(it) == {"placed_ms": 1.0, "joined_ms": 5.0, "first_token_ms": 10.0, "queued_ms": 5.0}


def test_request_that_failed_at_once_has_no_phases():
    assert summary_ms(Timeline(router=RouterTimeline(received=5))) == {}
    assert summary_ms(Timeline(prefiller=PrefillTimeline()))["exposed_transfer_ms"] == 0.0


def test_transfer_that_ended_before_its_last_layer_was_seen_exposes_nothing():
    assert PrefillTimeline(last_layer=5, last_write=3).exposed_ns == 0
    assert PrefillTimeline(last_layer=5).exposed_ns == 0


def test_time_line_of_a_prompt_that_took_a_pass_for_each_token_can_be_sent():
    it = PrefillTimeline(received=now())
    for token in range(131_072):
        it.add(Chunk(it.received + token * MS, it.received + (token + 1) * MS, 1))
    report = PrefillReport(request_id="r" * 64, slot=1, generation=1, timeline=it)
    assert len(encode(NodeRef("p", 1), report)[0]) < MAX_HEADER_BYTES // 2
    assert (it.chunks[0].started, it.chunks[-1].ended) == (it.received, it.received + 131_072 * MS)
    assert sum(chunk.tokens for chunk in it.chunks) == 131_072


def test_clock():
    assert clock_id() == clock_id()
    assert now() <= now()
