"""The prefiller's batch scheduler: chunks, pages that leave with them, pages that come back."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_engine.allocator import PageAllocator
from kvferry_prefiller.request import Request, State
from kvferry_prefiller.scheduler import Chunk, Scheduler, pages_to_send
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRef
from kvferry_proto.to_prefiller import Prefill

LAYOUT = KVLayout(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=4, page_size=4)


def make_scheduler(pages=16, *, chunk_size=8, max_running=8):
    return Scheduler(PageAllocator(pages), LAYOUT, chunk_size=chunk_size, max_running=max_running, max_waiting=100)


def make_request(tokens, name="r"):
    order = Prefill(
        request_id=name,
        tokens=Int32s(range(tokens)),
        pages=Int32s(range(LAYOUT.pages_for(tokens))),
        slot=0,
        generation=0,
        layout=LAYOUT,
        memory=[],
    )
    return Request(order, SimpleNamespace(sender=NodeRef("d", 1)), [])


def step(scheduler):
    chunks = scheduler.plan_step()
    scheduler.finish_step(chunks)
    return [(chunk.request.order.request_id, chunk.start, chunk.tokens) for chunk in chunks]


def test_a_long_prompt_is_cut_into_chunks():
    scheduler = make_scheduler(chunk_size=8)
    request = make_request(20)
    scheduler.add(request)
    assert [step(scheduler) for _ in range(4)] == [[("r", 0, 8)], [("r", 8, 8)], [("r", 16, 4)], []]
    assert request.state is State.DRAINING


def test_short_prompts_share_a_pass_first_come_first_served():
    scheduler = make_scheduler(chunk_size=8)
    for name, tokens in (("a", 5), ("b", 5), ("c", 2)):
        scheduler.add(make_request(tokens, name))
    assert step(scheduler) == [("a", 0, 5), ("b", 0, 3)]
    assert step(scheduler) == [("b", 3, 2), ("c", 0, 2)]


def test_prompts_that_together_exceed_the_pool_take_turns_and_hold_no_parts():
    scheduler = make_scheduler(pages=6, chunk_size=100)
    first, second = make_request(20, "a"), make_request(20, "b")
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == [("a", 0, 20)]
    assert not second.pages
    assert step(scheduler) == []
    scheduler.release(first)
    assert step(scheduler) == [("b", 0, 20)]


def test_pages_are_not_freed_while_a_pass_or_a_write_uses_them():
    scheduler = make_scheduler()
    request = make_request(8)
    scheduler.add(request)
    chunks = scheduler.plan_step()
    request.transfers.add(1)
    scheduler.stop(request)
    assert not scheduler.can_release(request)
    scheduler.finish_step(chunks)
    assert not scheduler.can_release(request)
    request.transfers.clear()
    assert scheduler.can_release(request)
    scheduler.release(request)
    assert scheduler.allocator.free_pages == 16
    assert request.state is State.STOPPED


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 7, 8, 9, 16, 100])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_page_leaves_once_with_the_chunk_that_completes_it(tokens, chunk_size, page_size):
    request = make_request(tokens)
    left, completed_by = [], {}
    for start in range(0, tokens, chunk_size):
        chunk = Chunk(request, start, min(chunk_size, tokens - start))
        for page in pages_to_send(chunk, page_size):
            left.append(page)
            completed_by[page] = chunk
    assert left == list(range(-(-tokens // page_size)))
    for page, chunk in completed_by.items():
        last_token = min(tokens, (page + 1) * page_size) - 1
        assert chunk.start <= last_token < chunk.end


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "stop", "write"]), st.integers(0, 5), st.integers(1, 40)), max_size=80
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_whatever_happens_pages_add_up_and_everyone_leaves(actions):
    scheduler, number = make_scheduler(pages=10, chunk_size=7, max_running=3), 0
    for action, pick, size in actions:
        alive = list(scheduler.requests)
        if action == "add":
            number += 1
            scheduler.add(make_request(size, f"r{number}"))
        elif action == "stop" and alive and alive[pick % len(alive)].state is not State.STOPPING:
            scheduler.stop(alive[pick % len(alive)])
        elif action == "write":
            release_all(scheduler)
        else:
            step(scheduler)
        scheduler.allocator.check()
        held = [page for request in scheduler.requests for page in request.pages]
        assert len(held) == len(set(held)) == scheduler.allocator.held_pages
        assert scheduler.queued_tokens >= 0
    for _ in range(1000):
        if not scheduler.requests:
            break
        step(scheduler)
        release_all(scheduler)
    assert not scheduler.requests
    assert scheduler.allocator.free_pages == 10


def release_all(scheduler):
    for request in list(scheduler.leaving):
        if scheduler.can_release(request):
            scheduler.release(request)
