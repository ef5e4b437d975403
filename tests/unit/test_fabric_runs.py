"""runs(): neighbours on both sides become one run, and nothing else changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_fabric import page_checksums, runs

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60)
STEPS = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, -3, 0]), st.sampled_from([1, 1, 1, 5, -2, 0])), max_size=60)


def expand(table: np.ndarray) -> list[tuple[int, int]]:
    return [(source + i, target + i) for source, target, count in table.tolist() for i in range(count)]


def check(pairs: list[tuple[int, int]]) -> None:
    table = runs([s for s, _ in pairs], [d for _, d in pairs])
    assert table.dtype == np.int32
    assert table.shape[1] == 3
    assert expand(table) == pairs
    for (s0, d0, n0), (s1, d1, _) in zip(table.tolist(), table.tolist()[1:], strict=False):
        assert (s0 + n0, d0 + n0) != (s1, d1), "two neighbouring runs were not merged"


@settings(deadline=None)
@given(PAIRS)
def test_any_pairs_survive(pairs: list[tuple[int, int]]) -> None:
    check(pairs)


@settings(deadline=None)
@given(STEPS)
def test_mostly_contiguous_pairs_are_merged(steps: list[tuple[int, int]]) -> None:
    source, target, pairs = 200, 200, []
    for ds, dd in steps:
        source, target = source + ds, target + dd
        pairs.append((source, target))
    check(pairs)


def test_a_contiguous_range_is_one_run() -> None:
    assert runs(np.arange(10, 200), np.arange(50, 240)).tolist() == [[10, 50, 190]]


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ([1], [1, 2], "cannot be paired"),
        ([-1], [0], "must lie in"),
        ([0], [1 << 31], "must lie in"),
        ([[1]], [[1]], "one-dim"),
    ],
)
def test_bad_pages_are_refused(source, target, text) -> None:
    with pytest.raises(ValueError, match=text):
        runs(source, target)


def test_page_checksums_name_the_page_that_differs() -> None:
    memory = np.random.default_rng(1).integers(0, 256, (2, 8, 64), dtype=np.uint8)
    shape = {"layers": 2, "layer_stride": 512, "page_stride": 64, "length": 64}
    before = page_checksums(memoryview(memory), [1, 5, 7], **shape)
    memory[1, 5, 63] ^= 1
    after = page_checksums(memoryview(memory), [1, 5, 7], **shape)
    assert np.argwhere(before != after).tolist() == [[1, 1]]
    with pytest.raises(ValueError, match="leave the buffer"):
        page_checksums(memoryview(memory), [8], **shape)
