"""The decoder's scheduler: pages are accounted for, nobody starves, nobody hangs."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_decoder.request import Request, State
from kvferry_decoder.scheduler import Scheduler
from kvferry_decoder.speculation import Speculation
from kvferry_engine.prefix_cache import PrefixCache
from kvferry_proto.hashing import block_hashes
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRef, Peer
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_decoder import Assign

LAYOUT = KVLayout(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=4, page_size=4)
PREFILLER = Peer(ref=NodeRef("p", 1), endpoint="tcp://127.0.0.1:1", layout=LAYOUT)


def make_scheduler(pages=16, *, max_running=8, max_waiting=8, prefill_budget=6, local_prefill=0, speculation=None):
    return Scheduler(
        PrefixCache(pages),
        LAYOUT,
        max_running=max_running,
        max_waiting=max_waiting,
        prefill_budget=prefill_budget,
        local_prefill=local_prefill,
        speculation=speculation,
    )


def make_request(order, tokens, *, prefiller=None, max_tokens=8, seed=None, salt=""):
    """A prompt that shares a beginning with nobody's, or, with a `seed`, with everybody's who has the same."""
    start = 1000 * (order + 100 if seed is None else seed)
    assign = Assign(
        request_id=f"r{order}",
        tokens=Int32s(range(start, start + tokens)),
        page_table=Int32s(),
        sampling=SamplingParams(max_tokens=max_tokens),
        stop_token_ids=[999],
        prefiller=prefiller,
        cache_salt=salt,
    )
    return Request.from_assign(assign, SimpleNamespace(sender=NodeRef("r", 1), key=b"r"), order)


def drive(scheduler, request, token=7):
    """One step; every request that draws gets `token`."""
    slices = scheduler.plan_step()
    scheduler.finish_step(slices)
    for piece in slices:
        if not piece.draws:
            assert not piece.drafts
            continue
        right = piece.drafts[: len(piece.drafts) // 2]
        count, finish = piece.request.extend([*right, token], 10_000)
        scheduler.accept(piece.request, count - 1)
        if finish is not None:
            scheduler.end(piece.request, State.FINISHED)
    return [(piece.request, piece.start, piece.tokens) for piece in slices if piece.request is request]


def test_a_prompt_of_one_token_is_decoded_in_the_first_step():
    scheduler = make_scheduler()
    request = make_request(0, 1)
    scheduler.add(request)
    assert scheduler.admit(can_receive=False) == [request]
    assert drive(scheduler, request) == [(request, 0, 1)]
    assert request.generated == 1


def test_local_prefill_is_cut_to_the_budget_and_ends_with_the_first_token():
    scheduler = make_scheduler(prefill_budget=6)
    request = make_request(0, 14)
    scheduler.add(request)
    scheduler.admit(can_receive=True)
    assert [drive(scheduler, request) for _ in range(3)] == [
        [(request, 0, 6)],
        [(request, 6, 6)],
        [(request, 12, 2)],
    ]
    assert request.generated == 1


def test_decoding_goes_on_beside_a_long_local_prefill():
    scheduler = make_scheduler(pages=64)
    decoding, long = make_request(0, 1, max_tokens=50), make_request(1, 100)
    for request in (decoding, long):
        scheduler.add(request)
    scheduler.admit(can_receive=True)
    for step in range(10):
        drive(scheduler, decoding)
        assert decoding.generated == step + 1


def test_a_received_prompt_joins_with_its_last_token_alone():
    scheduler = make_scheduler()
    request = make_request(0, 9, prefiller=PREFILLER)
    scheduler.add(request)
    assert scheduler.admit(can_receive=True) == [request]
    assert request.state is State.RECEIVING
    assert len(request.pages) == 3
    assert scheduler.plan_step() == []
    scheduler.arrived(request)
    assert drive(scheduler, request) == [(request, 8, 1)]


def test_without_a_slot_a_prompt_to_receive_waits_and_the_queue_keeps_its_order():
    scheduler = make_scheduler()
    first, second = make_request(0, 9, prefiller=PREFILLER), make_request(1, 1)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.admit(can_receive=False) == []
    assert list(scheduler.waiting) == [first, second]


def test_several_long_prompts_that_together_exceed_the_pool_do_not_hold_parts():
    scheduler = make_scheduler(pages=8)
    requests = [make_request(order, 20, prefiller=PREFILLER) for order in range(3)]
    for request in requests:
        scheduler.add(request)
    assert scheduler.admit(can_receive=True) == requests[:1]
    assert scheduler.admit(can_receive=True) == []
    assert not requests[1].pages
    scheduler.arrived(requests[0])
    while requests[0].state is State.RUNNING:
        drive(scheduler, requests[0])
    assert scheduler.admit(can_receive=True) == [requests[1]]


def test_a_preempted_request_is_computed_again_and_finishes():
    scheduler = make_scheduler(pages=6)
    requests = [make_request(order, 8, prefiller=PREFILLER, max_tokens=8) for order in range(2)]
    for request in requests:
        scheduler.add(request)
        scheduler.admit(can_receive=True)
        scheduler.arrived(request)
    for _ in range(100):
        if all(request.state is State.FINISHED for request in requests):
            break
        scheduler.admit(can_receive=True)
        drive(scheduler, None)
    assert [request.generated for request in requests] == [8, 8]
    assert scheduler.preemptions > 0
    assert scheduler.pages.allocator.free_pages == 6


def test_pages_of_a_request_that_ends_during_a_step_are_freed_after_it():
    scheduler = make_scheduler()
    request = make_request(0, 5)
    scheduler.add(request)
    scheduler.admit(can_receive=True)
    slices = scheduler.plan_step()
    scheduler.end(request, State.CANCELLED)
    assert scheduler.pages.allocator.held_pages == 2
    scheduler.finish_step(slices)
    assert scheduler.pages.allocator.held_pages == 0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_the_answer_unless_ignored(ignore_eos):
    request = make_request(0, 2)
    request.sampling = SamplingParams(max_tokens=8, ignore_eos=ignore_eos)
    assert (request.append(999, 10_000) is None) is ignore_eos


# --- the cache ------------------------------------------------------------------------------------------------------


def finish(scheduler, request):
    """Carry a request through to its end, whoever prefills it."""
    scheduler.add(request)
    assert scheduler.admit(can_receive=True) == [request]
    if request.state is State.RECEIVING:
        scheduler.arrived(request)
    while request.state is State.RUNNING:
        drive(scheduler, request)
    return request


@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_only_pages_that_are_not_here_are_asked_for(held):
    scheduler = make_scheduler()
    if held:
        finish(scheduler, make_request(0, 4 * held + 1, prefiller=PREFILLER, max_tokens=1, seed=1))
    request = make_request(1, 17, prefiller=PREFILLER, seed=1)
    scheduler.add(request)
    scheduler.admit(can_receive=True)
    assert (request.state, request.held, len(request.pages)) == (State.RECEIVING, held, 5)
    scheduler.arrived(request)
    assert drive(scheduler, request) == [(request, 16, 1)]


@pytest.mark.parametrize("tokens", [5, 16, 17, 18])
def test_a_prompt_that_is_all_here_joins_without_a_slot(tokens):
    scheduler = make_scheduler()
    first = finish(scheduler, make_request(0, tokens, prefiller=PREFILLER, max_tokens=4, seed=1))
    again = make_request(1, tokens, prefiller=PREFILLER, seed=1)
    # What is missing behind the last full page is up to the prefiller, unless the decoder may do it itself.
    scheduler.local_prefill = 3
    scheduler.add(again)
    assert scheduler.admit(can_receive=False) == [again]
    full = (tokens - 1) // 4
    assert (again.state, again.held, again.cached) == (State.RUNNING, full, 4 * full)
    assert drive(scheduler, again) == [(again, 4 * full, tokens - 4 * full)]
    assert first.pages == []


def test_the_page_of_the_last_token_is_never_shared():
    """It is computed again for its logits, and a page that others read is never written to."""
    scheduler = make_scheduler()
    finish(scheduler, make_request(0, 16, max_tokens=2, seed=1))
    again = make_request(1, 16, seed=1)
    scheduler.add(again)
    scheduler.admit(can_receive=True)
    assert again.held == 3


def test_the_next_turn_of_a_chat_finds_the_answers_pages():
    scheduler = make_scheduler()
    first = finish(scheduler, make_request(0, 9, prefiller=PREFILLER, max_tokens=8, seed=1))
    turn = make_request(1, 1, prefiller=PREFILLER)
    turn.tokens = [*first.tokens, 1, 2, 3]
    scheduler.add(turn)
    scheduler.admit(can_receive=True)
    # 9 of the prompt and 8 drawn, the last of which was never run: 16 tokens, 4 pages.
    assert (turn.held, len(turn.tokens)) == (4, 20)


def test_what_is_being_received_is_shared_when_it_has_arrived_not_before():
    scheduler = make_scheduler()
    first, second, third = (make_request(order, 9, prefiller=PREFILLER, seed=1) for order in range(3))
    for request in (first, second):
        scheduler.add(request)
        scheduler.admit(can_receive=True)
    assert second.held == 0
    scheduler.arrived(first)
    scheduler.add(third)
    scheduler.admit(can_receive=True)
    assert third.state is State.RUNNING
    assert third.pages[:2] == first.pages[:2]


def test_only_pages_that_are_being_written_are_surrendered():
    scheduler = make_scheduler()
    finish(scheduler, make_request(0, 9, prefiller=PREFILLER, max_tokens=1, seed=1))
    request = make_request(1, 17, prefiller=PREFILLER, seed=1)
    scheduler.add(request)
    scheduler.admit(can_receive=True)
    shared, own = request.pages[:2], request.pages[2:]
    assert scheduler.pages.surrender(request) == own
    scheduler.pages.allocator.quarantine(own)
    scheduler.end(request, State.CANCELLED)
    assert scheduler.pages.allocator.find(make_hashes(request)) == shared
    scheduler.pages.allocator.release_quarantine(own)
    scheduler.pages.allocator.check()
    assert scheduler.pages.allocator.free_pages == 16


def make_hashes(request):
    return block_hashes(request.tokens, LAYOUT.page_size, LAYOUT.model, request.cache_salt)


def test_pages_of_a_step_that_broke_are_not_shared():
    scheduler = make_scheduler()
    request = make_request(0, 6, seed=1)
    scheduler.add(request)
    scheduler.admit(can_receive=True)
    scheduler.give_up_step(scheduler.plan_step())
    assert request.computed == 0
    scheduler.end(request, State.FAILED)
    assert (scheduler.pages.allocator.cached_pages, scheduler.pages.allocator.held_pages) == (0, 0)


def test_what_is_doubtful_is_shared_no_more():
    scheduler = make_scheduler()
    request = make_request(0, 9, seed=1, prefiller=PREFILLER)
    scheduler.add(request)
    scheduler.admit(can_receive=True)
    scheduler.arrived(request)
    scheduler.pages.doubt(request)
    scheduler.end(request, State.FAILED)
    assert scheduler.pages.allocator.cached_pages == 0


def test_salts_keep_tenants_apart():
    scheduler = make_scheduler()
    finish(scheduler, make_request(0, 9, max_tokens=1, seed=1, salt="alice"))
    for order, (salt, held) in enumerate([("bob", 0), ("", 0), ("alice", 2)], 1):
        request = finish(scheduler, make_request(order, 9, max_tokens=1, seed=1, salt=salt))
        assert request.cached == 4 * held


def test_a_preempted_request_finds_its_own_pages_and_does_not_count_them_as_cached():
    scheduler = make_scheduler()
    request = make_request(0, 9, prefiller=PREFILLER, max_tokens=20)
    scheduler.add(request)
    scheduler.admit(can_receive=True)
    request.accepted = True
    scheduler.arrived(request)
    drive(scheduler, request)
    scheduler._preempt(request)
    assert scheduler.admit(can_receive=False) == [request]
    assert (request.held, request.computed, request.cached) == (2, 8, 0)


def test_a_page_for_drafts_alone_goes_to_who_needs_one():
    """Drafts that turn out to be wrong have the last free page, until another request's next token needs it."""
    scheduler = make_scheduler(pages=4, speculation=Speculation("ngram", 4, 10_000))
    first, second = make_request(0, 5), make_request(1, 4)
    first.tokens[:] = [5, 6, 5, 6, 5]
    for request in (first, second):
        scheduler.add(request)
    assert scheduler.admit(can_receive=True) == [first, second]
    pages = []
    for token in (7, 8, 9):
        slices = scheduler.plan_step()
        pages.append((len(first.pages), len(second.pages)))
        assert [list(piece.drafts) for piece in slices if piece.drafts] == ([[6, 5, 6, 5]] if token == 7 else [])
        scheduler.finish_step(slices)
        for piece in slices:
            if piece.draws:
                piece.request.append(token, 10_000)
    assert pages == [(3, 1), (3, 1), (2, 2)]
    assert scheduler.preemptions == 0


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "arrive", "cancel"]), st.integers(0, 7), st.integers(1, 24)), max_size=80
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.booleans(), st.sampled_from(["off", "ngram"]))
def test_whatever_happens_pages_add_up_and_everyone_ends(actions, local, way):
    scheduler = make_scheduler(pages=10, max_running=4, max_waiting=100, speculation=Speculation(way, 5, 10_000))
    requests = []
    for action, pick, size in actions:
        if action == "add":
            prefiller = None if local or size == 1 else PREFILLER
            fields = {"prefiller": prefiller, "max_tokens": pick + 1, "seed": pick % 2}
            requests.append(make_request(len(requests), size, **fields))
            scheduler.add(requests[-1])
        elif action == "arrive" and scheduler.receiving:
            scheduler.arrived(min(scheduler.receiving, key=lambda r: r.order))
        elif action == "cancel" and scheduler.requests:
            alive = list(scheduler.requests)
            scheduler.end(alive[pick % len(alive)], State.CANCELLED)
        else:
            scheduler.admit(can_receive=True)
            drive(scheduler, None)
        check(scheduler)
    for _ in range(2000):
        if not scheduler.requests:
            break
        scheduler.admit(can_receive=True)
        for request in list(scheduler.receiving):
            scheduler.arrived(request)
        drive(scheduler, None)
    assert not scheduler.requests
    assert scheduler.pages.allocator.free_pages == 10
    assert all(request.machine.final for request in requests)


def check(scheduler):
    scheduler.pages.allocator.check()
    held = {page for request in scheduler.requests for page in request.pages}
    assert len(held) == scheduler.pages.allocator.held_pages
    own = [page for request in scheduler.requests for page in request.pages[request.computed // LAYOUT.page_size :]]
    assert len(own) == len(set(own)), "two requests write to one page"
    for request in scheduler.running:
        assert len(request.pages) * LAYOUT.page_size >= request.computed
