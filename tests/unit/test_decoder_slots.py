"""Transfer slots: drawn once, rested long, told apart by generation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_decoder.slots import Slot, SlotPool
from kvferry_proto.immediate import MAX_GENERATIONS, MAX_SLOTS


def test_a_slot_comes_back_under_another_generation():
    pool = SlotPool(1)
    first = pool.draw()
    pool.give_back(first)
    second = pool.draw()
    assert second.number == first.number
    assert second.generation != first.generation


def test_generations_wrap_within_their_bits():
    pool = SlotPool(1)
    seen = set()
    for _ in range(MAX_GENERATIONS + 1):
        slot = pool.draw()
        seen.add(slot.generation)
        pool.give_back(slot)
    assert seen == set(range(MAX_GENERATIONS))


def test_an_empty_pool_says_so():
    pool = SlotPool(2)
    pool.draw()
    pool.draw()
    assert not pool.can_draw()
    with pytest.raises(IndexError):
        pool.draw()


def test_a_slot_is_given_back_once_and_by_its_present_user():
    pool = SlotPool(1)
    slot = pool.draw()
    with pytest.raises(ValueError, match="not drawn"):
        pool.give_back(Slot(slot.number, slot.generation + 1))
    pool.give_back(slot)
    with pytest.raises(ValueError, match="not drawn"):
        pool.give_back(slot)


@pytest.mark.parametrize("slots", [0, MAX_SLOTS + 1])
def test_a_pool_that_immediates_cannot_name_is_refused(slots):
    with pytest.raises(ValueError, match="transfer slots"):
        SlotPool(slots)


@given(st.lists(st.booleans(), max_size=60))
def test_no_slot_is_drawn_twice(draws):
    pool, held = SlotPool(4), []
    for draw in draws:
        if draw and pool.can_draw():
            held.append(pool.draw())
        elif not draw and held:
            pool.give_back(held.pop(0))
        assert len({slot.number for slot in held}) == len(held) == pool.held
