"""A step on its way to the ranks, and the checksums of pages that lie on several of them."""

import random
import socket
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_engine.batch import SequenceSlice
from kvferry_engine.checksums import first_difference, page_checksums, sent, written
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.ranks.steps import Step, Work, pack, receive
from kvferry_proto.layout import KVLayout
from kvferry_proto.shards import plan

PAGE = 4

slices = st.builds(
    lambda tokens, start, want, spare, following: SequenceSlice(
        tokens, start, list(range(100, 100 + -(-(start + len(tokens)) // PAGE) + spare)), want, following
    ),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30),
    st.integers(0, 50),
    st.integers(0, 17),
    st.integers(0, 3),
    st.none() | st.integers(0, 2**31 - 1),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(slices, min_size=1, max_size=6), st.sampled_from(Work))
def test_a_step_arrives_as_it_was_sent(pieces, work):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack(Step(pieces, work), PAGE))
        step = receive(theirs)
    assert step.work is work
    assert step.hidden is None
    assert len(step.slices) == len(pieces)
    for got, piece in zip(step.slices, pieces, strict=True):
        needed = -(-(piece.start + len(piece.tokens)) // PAGE)
        assert (got.start, got.want_logits, got.following) == (piece.start, piece.want_logits, piece.following)
        assert got.tokens.tolist() == list(piece.tokens)
        assert got.pages.tolist() == piece.pages[:needed]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_arrive_with_their_step(dtype):
    ours, theirs = socket.socketpair()
    hidden = torch.randn(5, 6).to(dtype)
    pieces = [SequenceSlice([1, 2], 3, [0, 1]), SequenceSlice([4, 5, 6], 0, [2], 0)]
    with ours, theirs:
        ours.sendall(pack(Step(pieces, Work.DRAFT, hidden[:, ::2].repeat(1, 2)), PAGE))
        step = receive(theirs)
    assert torch.equal(step.hidden.view(dtype).view(5, 6), hidden[:, ::2].repeat(1, 2))
    assert [piece.tokens.tolist() for piece in step.slices] == [[1, 2], [4, 5, 6]]
    assert [piece.pages.tolist() for piece in step.slices] == [[0, 1], [2]]


def test_a_long_step_is_read_in_pieces_and_a_hang_up_ends_the_steps():
    ours, theirs = socket.socketpair()
    step = Step([SequenceSlice(np.arange(1_000_000, dtype=np.int32), 0, list(range(250_000)))], Work.LOGITS)
    sender = threading.Thread(target=lambda: (ours.sendall(pack(step, PAGE)), ours.sendall(b"\1"), ours.close()))
    sender.start()
    with theirs:
        assert receive(theirs).slices[0].tokens[-1] == 999_999
        assert receive(theirs) is None
        assert receive(theirs) is None
    sender.join()


def filled(layout, pages=6):
    """Pools of all ranks whose heads hold the same bytes on whichever rank they are."""
    pools = [KVPool(layout, pages) for _ in range(layout.ranks)]
    for rank, pool in enumerate(pools):
        for local in range(layout.heads_per_rank):
            dice = np.random.default_rng(layout.first_head(rank) + local)
            shape = pool.tensor[:, :, local].shape
            pool.tensor[:, :, local] = pool.tensor.new_tensor(dice.standard_normal(shape, dtype=np.float32))
    return pools


@pytest.mark.parametrize(
    ("heads", "source", "destination"), [(4, 1, 1), (4, 2, 1), (4, 1, 4), (4, 4, 2), (2, 4, 4), (1, 2, 4), (6, 2, 3)]
)
def test_both_sides_of_a_transfer_compute_the_same_and_every_byte_counts(heads, source, destination):
    layouts = [
        KVLayout(model="m", dtype="float32", layers=2, kv_heads=heads, head_dim=8, page_size=PAGE, ranks=ranks)
        for ranks in (source, destination)
    ]
    pieces = plan(*layouts)
    theirs, mine = (filled(layout) for layout in layouts)
    pages = [4, 1, 3]
    there = page_checksums(theirs, pages, sent(pieces))
    assert len(there) == 2 * len(pages)
    assert len(set(there)) == len(there)
    assert first_difference(page_checksums(mine, pages, written(pieces)), there, len(pages)) is None
    dice = random.Random(heads)
    for rank, pool in enumerate(mine):
        layer, page = dice.randrange(2), dice.randrange(3)
        view = pool.page(layer, pages[page])
        at = dice.randrange(len(view))
        view[at] ^= 1
        difference = first_difference(page_checksums(mine, pages, written(pieces)), there, len(pages))
        assert difference == f"page {page} of the prompt differs in layer {layer}", rank
        view[at] ^= 1
