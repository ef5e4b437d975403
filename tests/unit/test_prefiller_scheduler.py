"""The prefiller's batch scheduler: chunks, their order, pages that leave with them, pages that come back."""

import zlib
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_engine.prefix_cache import PrefixCache
from kvferry_prefiller.request import Request, State
from kvferry_prefiller.scheduler import Chunk, Scheduler, pages_to_send, pages_to_send_at_once
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRef
from kvferry_proto.to_prefiller import Prefill

LAYOUT = KVLayout(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=4, page_size=4)


AGE = 100


def make_scheduler(pages=16, *, chunk_size=8, max_running=8, age=0, cache=True):
    """With an age limit of 0 it is first come, first served."""
    return Scheduler(
        PrefixCache(pages, enabled=cache),
        LAYOUT,
        chunk_size=chunk_size,
        max_running=max_running,
        max_waiting=1000,
        age_limit_ns=age,
    )


def make_request(tokens, name="r", *, seed=None, first_page=0, received=0):
    """A prompt that shares a beginning with nobody's, or, with a `seed`, with everybody's who has the same."""
    start = zlib.crc32(name.encode()) >> 2 if seed is None else seed * 1000
    order = Prefill(
        request_id=name,
        tokens=Int32s(range(start, start + tokens)),
        pages=Int32s(range(first_page, LAYOUT.pages_for(tokens))),
        first_page=first_page,
        slot=0,
        generation=0,
        layout=LAYOUT,
        memory=[],
    )
    request = Request(order, SimpleNamespace(sender=NodeRef("d", 1)), [])
    request.timeline.received = received
    return request


def step(scheduler, at=0):
    scheduler.admit(at)
    chunks = scheduler.plan_step(at)
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
    scheduler.admit(0)
    chunks = scheduler.plan_step(0)
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


# --- order ----------------------------------------------------------------------------------------------------------


def test_short_prompts_go_before_a_long_one_that_came_first():
    scheduler = make_scheduler(pages=64, chunk_size=8, age=AGE)
    for name, tokens in (("long", 40), ("b", 5), ("c", 2)):
        scheduler.add(make_request(tokens, name))
    assert step(scheduler) == [("c", 0, 2), ("b", 0, 5), ("long", 0, 1)]
    assert step(scheduler) == [("long", 1, 8)]


def test_one_long_document_does_not_hold_a_hundred_short_prompts():
    """Short ones come as long as it is there; an age limit of 40 passes bounds how long it waits for them."""
    scheduler = make_scheduler(pages=200, chunk_size=8, age=40, max_running=200, cache=False)
    scheduler.add(make_request(400, "document"))
    done = {}
    for at in range(200):
        for name in (f"{at}-{each}" for each in range(2 if at < 50 else 0)):
            scheduler.add(make_request(4, name, received=at))
        step(scheduler, at)
        for request in list(scheduler.leaving):
            done[request.order.request_id] = at
        release_all(scheduler)
    waits = [end - int(name.split("-")[0]) for name, end in done.items() if name != "document"]
    assert len(waits) == 100
    # As if it were not there until it is old; and then it takes half of every pass.
    assert max(waits) <= 10
    assert sum(end < 50 for end in done.values()) >= 80
    assert done["document"] == (400 + 4 * 100) // 8 - 1, "no pass was left empty"


def test_a_long_prompt_that_is_old_has_half_of_every_pass():
    scheduler = make_scheduler(pages=64, chunk_size=8, age=AGE)
    scheduler.add(make_request(40, "long"))
    for number in range(20):
        scheduler.add(make_request(8, f"s{number}", received=AGE))
    assert step(scheduler, AGE) == [("long", 0, 4), ("s0", 0, 4)]
    assert step(scheduler, AGE) == [("long", 4, 4), ("s0", 4, 4)]


def test_one_that_does_not_fit_is_overtaken_until_it_is_old():
    scheduler = make_scheduler(pages=6, chunk_size=100, age=AGE)
    first = make_request(16, "first")
    scheduler.add(first)
    step(scheduler)
    scheduler.add(make_request(16, "large", received=1))
    scheduler.add(make_request(4, "small", received=2))
    assert step(scheduler, 3) == [("small", 0, 4)]
    scheduler.add(make_request(4, "late", received=AGE))
    assert step(scheduler, AGE + 1) == [], "an old one at the head is not overtaken"
    scheduler.release(first)
    assert step(scheduler, AGE + 2)[0][0] == "large"


ARRIVALS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=30)
"""Passes before it comes, and tokens."""


@settings(max_examples=150, deadline=None)
@given(ARRIVALS, st.integers(1, 16), st.integers(0, 12))
def test_every_pass_is_full_and_nobody_is_overtaken_for_longer_than_the_limit(arrivals, chunk_size, age):
    """Time is counted in passes."""
    scheduler = make_scheduler(pages=30 * 15, chunk_size=chunk_size, max_running=30, age=age, cache=False)
    at, todo = 0, list(enumerate(arrivals))
    while todo or scheduler.running or scheduler.waiting:
        while todo and todo[0][1][0] <= at:
            number, (_, tokens) = todo.pop(0)
            scheduler.add(make_request(tokens, f"r{number}", received=at))
            # The next one's wait begins with this one's arrival.
            todo = [(each, (gap + at if index == 0 else gap, size)) for index, (each, (gap, size)) in enumerate(todo)]
        scheduler.admit(at)
        running = {request: request.remaining for request in scheduler.running}
        chunks = scheduler.plan_step(at)
        assert sum(chunk.tokens for chunk in chunks) == min(chunk_size, sum(running.values()))
        old = sorted((each for each in running if at - each.timeline.received >= age), key=lambda each: each.number)
        if old:
            served = sum(chunk.tokens for chunk in chunks if chunk.request in old)
            assert served >= min(-(-chunk_size // 2), sum(running[each] for each in old))
            assert chunks[0].request is old[0], "the oldest goes first"
        scheduler.finish_step(chunks)
        release_all(scheduler)
        at += 1
        assert at < 5000


# --- the cache ------------------------------------------------------------------------------------------------------


def run_through(scheduler, request):
    scheduler.add(request)
    done = []
    while part := step(scheduler):
        done += part
    assert request.state is State.DRAINING
    return done


@pytest.mark.parametrize("tokens", [15, 16, 17])
@pytest.mark.parametrize("held", [0, 1, 3, 4])
@pytest.mark.parametrize("lacking_from", [0, 1, 2, 3])
def test_only_what_is_missing_is_computed_and_only_what_the_decoder_lacks_leaves(tokens, held, lacking_from):
    """Prefix hits that differ on the two sides: every page that the decoder lacks leaves once, in order."""
    scheduler = make_scheduler(pages=20, chunk_size=6)
    if held:
        before = make_request(4 * held, "before", seed=1)
        run_through(scheduler, before)
        scheduler.release(before)
    request = make_request(tokens, "r", seed=1, first_page=lacking_from)
    chunks = run_through(scheduler, request)
    found = min(held, tokens // 4)
    assert request.held == found
    assert request.timeline.cached == 4 * found
    assert sum(count for _, _, count in chunks) == tokens - 4 * found
    left = list(pages_to_send_at_once(request))
    for _, start, count in chunks:
        left += pages_to_send(Chunk(request, start, count), LAYOUT.page_size)
    assert left == list(range(lacking_from, LAYOUT.pages_for(tokens)))


def test_a_prompt_that_is_all_here_is_not_computed_at_all():
    scheduler = make_scheduler()
    first = make_request(16, "first", seed=1)
    run_through(scheduler, first)
    again = make_request(16, "again", seed=1)
    assert run_through(scheduler, again) == []
    assert again.pages == first.pages
    scheduler.release(first)
    assert scheduler.allocator.held_pages == 4
    scheduler.release(again)
    assert (scheduler.allocator.held_pages, scheduler.allocator.cached_pages) == (0, 4)


def test_pages_of_a_pass_that_broke_are_not_shared():
    scheduler = make_scheduler()
    request = make_request(8, "r", seed=1)
    scheduler.add(request)
    scheduler.admit(0)
    chunks = scheduler.plan_step(0)
    scheduler.stop(request)
    scheduler.finish_step(chunks)
    scheduler.release(request)
    assert scheduler.allocator.cached_pages == 0


def test_salts_keep_tenants_apart():
    scheduler = make_scheduler(pages=20)
    request = make_request(16, "alice", seed=1)
    request.order.cache_salt = "alice"
    run_through(scheduler, request)
    other = make_request(16, "bob", seed=1)
    other.order.cache_salt = "bob"
    run_through(scheduler, other)
    assert other.held == 0


# --- everything at once ---------------------------------------------------------------------------------------------


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "stop", "write"]), st.integers(0, 5), st.integers(1, 40)), max_size=80
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.sampled_from([0, 5, 1000]))
def test_whatever_happens_pages_add_up_and_everyone_leaves(actions, age):
    scheduler, number = make_scheduler(pages=10, chunk_size=7, max_running=3, age=age), 0
    for at, (action, pick, size) in enumerate(actions):
        alive = list(scheduler.requests)
        if action == "add":
            number += 1
            scheduler.add(make_request(size, f"r{number}", seed=pick % 2, received=at))
        elif action == "stop" and alive and alive[pick % len(alive)].state is not State.STOPPING:
            scheduler.stop(alive[pick % len(alive)])
        elif action == "write":
            release_all(scheduler)
        else:
            step(scheduler, at)
        scheduler.allocator.check()
        held = {page for request in scheduler.requests for page in request.pages}
        assert len(held) == scheduler.allocator.held_pages
        assert scheduler.queued_tokens >= 0
    for _ in range(1000):
        if not scheduler.requests:
            break
        step(scheduler, 10_000)
        release_all(scheduler)
    assert not scheduler.requests
    assert scheduler.allocator.free_pages == 10


def release_all(scheduler):
    for request in list(scheduler.leaving):
        if scheduler.can_release(request):
            scheduler.release(request)
