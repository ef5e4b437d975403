"""What is said of a Redis that does not answer: never nothing, and nothing that is this process's own doing."""

import asyncio

import pytest
from kvferry_node.redis_link import NoAnswer, trouble, within


async def test_a_call_that_takes_too_long_says_so():
    with pytest.raises(NoAnswer) as caught:
        async with within(0.001):
            await asyncio.Event().wait()
    assert not caught.value.ours
    assert trouble(caught.value) == ("redis does not answer", "no answer within 0.001 s")


async def test_a_loop_that_runs_late_is_named():
    caught = NoAnswer(1.0, 0.5)
    assert caught.ours
    assert "this process itself was 0.50 s late" in trouble(caught)[1]


async def test_another_timeout_stays_what_it_is():
    with pytest.raises(TimeoutError) as caught:
        async with within(60):
            raise TimeoutError
    assert not isinstance(caught.value, NoAnswer)
    assert trouble(caught.value) == ("redis is unreachable", "TimeoutError")
