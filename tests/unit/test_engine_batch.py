import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.errors import BatchError


def build(*slices, page_size=4):
    return ForwardBatch.build(slices, page_size=page_size)


def test_a_mixed_batch():
    batch = build(
        SequenceSlice([10, 11, 12], start=3, pages=[7, 2, 9], want_logits=False),
        SequenceSlice([13], start=8, pages=[1, 5, 3]),
        SequenceSlice([14, 15], start=0, pages=[4]),
    )
    assert batch.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1]
    assert batch.slot_pages.tolist() == [7, 2, 2, 3, 4, 4]
    assert batch.slot_offsets.tolist() == [3, 0, 1, 0, 0, 1]
    assert batch.q_lens.tolist() == [3, 1, 2]
    assert batch.kv_lens.tolist() == [6, 9, 2]
    assert batch.q_starts.tolist() == [0, 3, 4]
    assert batch.logit_rows.tolist() == [3, 5]
    assert batch.page_table.tolist() == [[7, 2, 7], [1, 5, 3], [4, 4, 4]]
    assert batch.opened_pages.tolist() == [2, 3, 4]
    assert (len(batch), batch.token_count, batch.wants_logits) == (3, 6, True)


def test_logits_after_several_tokens_of_a_sequence():
    batch = build(
        SequenceSlice([10, 11, 12], start=3, pages=[7, 2], want_logits=3),
        SequenceSlice([13, 14], start=0, pages=[1], want_logits=0),
        SequenceSlice([14, 15, 16], start=0, pages=[4], want_logits=2),
    )
    assert batch.logit_rows.tolist() == [0, 1, 2, 6, 7]


@given(
    start=st.integers(0, 50),
    count=st.integers(1, 60),
    page_size=st.sampled_from([1, 3, 8, 16]),
    spare=st.integers(0, 3),
)
def test_every_token_has_its_own_place_in_its_own_page(start, count, page_size, spare):
    pages = np.random.default_rng(start).permutation(200)[: -(-(start + count) // page_size) + spare]
    batch = build(SequenceSlice(np.arange(count), start, pages), page_size=page_size)
    for index in range(count):
        position = start + index
        assert batch.slot_pages[index] == pages[position // page_size]
        assert batch.slot_offsets[index] == position % page_size
    full = {int(page) for page in batch.slot_pages if np.sum(batch.slot_pages == page) == page_size}
    opened = {int(p) for p, offset in zip(batch.slot_pages, batch.slot_offsets, strict=True) if offset == 0}
    assert set(batch.opened_pages.tolist()) == opened - full


@pytest.mark.parametrize(
    ("slices", "what"),
    [
        ([], "at least one sequence"),
        ([SequenceSlice([], 0, [1])], "runs 0 tokens"),
        ([SequenceSlice([1], -1, [1])], "from position -1"),
        ([SequenceSlice([1, 2], 3, [1])], "has 1 pages and needs 2"),
        ([SequenceSlice([1], 0, [1]), SequenceSlice([2], 0, [1])], "same place"),
        ([SequenceSlice([1] * 8, 0, [1, 1])], "same place"),
        ([SequenceSlice([1], 0, [1]), SequenceSlice([1, 2], 0, [2], 3)], "sequence 1 runs 2 .* after 3"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(slices, what):
    with pytest.raises(BatchError, match=what):
        build(*slices)


@pytest.mark.parametrize(
    ("tokens", "start", "pages", "what"),
    [
        ([100], 0, [0], "token id 100 is outside 0..99"),
        ([-1], 0, [0], "token id -1"),
        ([1], 16, [0, 1, 2, 3, 4], "position 16 is outside 0..15"),
        ([1], 0, [9], "page 9 is outside 0..8"),
        ([1], 4, [-1, 0], "page -1"),
    ],
)
def test_what_the_model_or_pool_does_not_have_is_refused(tokens, start, pages, what):
    batch = build(SequenceSlice(tokens, start, pages))
    with pytest.raises(BatchError, match=what):
        batch.check_fits(vocab_size=100, max_positions=16, pages=9)


def test_sequences_may_share_the_pages_of_a_prefix():
    batch = build(SequenceSlice([1], 4, [0, 1]), SequenceSlice([2], 4, [0, 2]))
    assert batch.slot_pages.tolist() == [1, 2]
