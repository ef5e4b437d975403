from hypothesis import given
from hypothesis import strategies as st
from kvferry_engine.attention.decode_groups import CALL_TOKENS, decode_groups
from kvferry_engine.batch import ForwardBatch, SequenceSlice


def groups(*runs):
    """Groups of a batch whose sequences run (new tokens, tokens before them)."""
    pages = [list(range(index * 100, index * 100 + 100)) for index in range(len(runs))]
    slices = [
        SequenceSlice([1] * count, start, table, want_logits=0)
        for (count, start), table in zip(runs, pages, strict=True)
    ]
    return [group.tolist() for group in decode_groups(ForwardBatch.build(slices, page_size=64))]


def test_rows_of_like_length_attend_together():
    assert groups((1, 60), (1, 50), (1, 70)) == [[0, 1, 2]]


def test_a_long_one_does_not_lengthen_the_others():
    assert groups((1, 60), (1, 4000), (1, 70), (1, 50)) == [[1], [0, 2, 3]]


def test_one_short_row_is_worth_some_padding():
    assert groups((1, CALL_TOKENS), (1, 1)) == [[0, 1]]
    assert groups((1, CALL_TOKENS + 2), (1, 1)) == [[0], [1]]


def test_prefills_are_in_no_group():
    assert groups((5, 0), (1, 20), (2, 4000)) == [[1]]
    assert groups((5, 0)) == []


@given(lengths=st.lists(st.integers(0, 6000), min_size=1, max_size=12))
def test_every_row_is_in_one_group_with_little_padding(lengths):
    found = groups(*((1, length) for length in lengths))
    assert sorted(row for group in found for row in group) == list(range(len(lengths)))
    for group in found:
        longest = max(lengths[row] for row in group)
        assert group == sorted(group)
        assert all(longest - lengths[row] <= CALL_TOKENS for row in group)
