"""The immediate's layout, and that C and Python agree on it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_fabric.native import load
from kvferry_proto import immediate

SLOTS = st.integers(0, immediate.MAX_SLOTS - 1)
GENERATIONS = st.integers(0, immediate.MAX_GENERATIONS - 1)
PAGES = st.integers(0, immediate.MAX_PAGES_PER_WRITE)


@settings(deadline=None)
@given(SLOTS, GENERATIONS, PAGES)
def test_pack_and_unpack_are_inverse(slot: int, generation: int, pages: int) -> None:
    value = immediate.pack(slot, generation, pages)
    assert 0 <= value < 1 << 32
    assert immediate.unpack(value) == (slot, generation, pages)


@settings(deadline=None)
@given(SLOTS, GENERATIONS, PAGES)
def test_c_packs_as_python_does(slot: int, generation: int, pages: int) -> None:
    ffi, lib = load()
    value = immediate.pack(slot, generation, pages)
    assert lib.kf_immediate_pack(slot, generation, pages) == value
    fields = ffi.new("uint32_t[3]")
    lib.kf_immediate_unpack(value, fields, fields + 1, fields + 2)
    assert tuple(fields) == (slot, generation, pages)


def test_c_has_the_same_limits() -> None:
    _, lib = load()
    assert lib.KF_MAX_SLOTS == immediate.MAX_SLOTS == 1 << lib.KF_SLOT_BITS
    assert lib.KF_MAX_GENERATIONS == immediate.MAX_GENERATIONS == 1 << lib.KF_GENERATION_BITS
    assert lib.KF_MAX_PAGES_PER_WRITE == immediate.MAX_PAGES_PER_WRITE == (1 << lib.KF_PAGES_BITS) - 1


@pytest.mark.parametrize("fields", [(-1, 0, 0), (1024, 0, 0), (0, 1024, 0), (0, -1, 0), (0, 0, 4096), (0, 0, -1)])
def test_a_field_that_does_not_fit_is_refused(fields: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        immediate.pack(*fields)
