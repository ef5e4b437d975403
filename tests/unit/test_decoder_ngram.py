"""Drafts that are looked up: the place that agrees longest with the end, in constant time a token."""

from hypothesis import given
from hypothesis import strategies as st
from kvferry_decoder.ngram import INDEXED_AT_ONCE, LONGEST, PLACES, PromptLookup


def searched(tokens, most):
    """The same by searching the whole sequence."""
    places = [at for at in range(len(tokens) - 1, 1, -1) if tokens[at - 2 : at] == tokens[-2:]][:PLACES]
    if not places:
        return []

    def agreeing(at):
        lengths = range(2, min(at, LONGEST) + 1)
        return max(length for length in lengths if tokens[at - length : at] == tokens[-length:])

    copied, best = list(tokens), max(places, key=lambda at: (agreeing(at), at))
    for index in range(most):
        copied.append(copied[best + index])
    return copied[len(tokens) :]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=90), st.integers(1, 90), st.integers(1, 9))
def test_what_is_found_is_what_a_search_finds(tokens, first, most):
    lookup = PromptLookup()
    for end in range(min(first, len(tokens)), len(tokens) + 1):
        assert lookup.drafts(tokens[:end], most) == searched(tokens[:end], most)


def test_a_loop_goes_on():
    assert PromptLookup().drafts([9, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]


def test_the_place_that_agrees_longest_counts_before_the_latest():
    assert PromptLookup().drafts([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 2) == [7, 9]


def test_one_token_alone_says_nothing():
    assert PromptLookup().drafts([5, 1, 6, 1], 3) == []
    assert PromptLookup().drafts([5], 3) == []


def test_a_long_sequence_is_indexed_over_several_steps():
    tokens = [*range(2 * INDEXED_AT_ONCE), 3, 4, 5]
    lookup = PromptLookup()
    assert [lookup.drafts(tokens, 2) for _ in range(4)] == [[], [], [6, 7], [6, 7]]
