"""Attention over pages in C against softmax(q k) v in double, whatever the shapes and the batch."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_levels import found, level, needs_kernels
from kvferry_engine.attention.kernel_cpu import FEW_TOKENS, KernelPlan
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.kv_pool import KVPool
from kvferry_proto.layout import KVLayout

pytestmark = needs_kernels
fixtures = (level,)
anything = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
PAGES = 120


class Sequences:
    """A pool of noise, over which sequences are drawn with all their keys and values known."""

    def __init__(self, seed, *, group, kv_heads, head_dim, page_size):
        self.random = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.head_dim, self.page_size = group * kv_heads, kv_heads, head_dim, page_size
        layout = KVLayout(
            model="m", dtype="bfloat16", layers=2, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size
        )
        self.pool = KVPool(layout, PAGES)
        self.pool.tensor.fill_(float("nan"))
        self.free = torch.randperm(PAGES, generator=self.random).tolist()

    def noise(self, tokens, heads):
        return torch.randn(tokens, heads, self.head_dim, generator=self.random).bfloat16()

    def slice(self, start, new):
        count = -(-(start + new) // self.page_size)
        pages, self.free = self.free[:count], self.free[count:]
        return SequenceSlice([1] * new, start, pages)

    def fill(self, slices):
        """Write the keys and values of what came before; returns them by sequence."""
        earlier = []
        for piece in slices:
            k, v = self.noise(piece.start, self.kv_heads), self.noise(piece.start, self.kv_heads)
            earlier.append((k, v))
            if piece.start:
                before = SequenceSlice([1] * piece.start, 0, piece.pages)
                self.plan([before]).append_kv(1, k, v)
        return earlier

    def plan(self, slices):
        return KernelPlan(ForwardBatch.build(slices, page_size=self.page_size), self.pool, found)


def expected(q, k, v):
    """Attention of the last len(q) tokens of one sequence, in double."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu_(len(k) - len(q) + 1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


shapes = st.fixed_dictionaries(
    {
        "group": st.integers(1, 9),
        "kv_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([16, 48, 64, 128]),
        "page_size": st.sampled_from([7, 8, 16, 64]),
    }
)
pieces = st.lists(
    st.tuples(st.integers(0, 90), st.sampled_from([1, 2, 5, FEW_TOKENS, FEW_TOKENS + 1, 33, 70])),
    min_size=1,
    max_size=4,
)


@anything
@given(seed=st.integers(0, 1000), shape=shapes, pieces=pieces)
def test_whatever_runs_together_attends_to_its_own(level, seed, shape, pieces):
    of = Sequences(seed, **shape)
    slices = [of.slice(*piece) for piece in pieces]
    earlier = of.fill(slices)
    plan = of.plan(slices)
    tokens = sum(new for _, new in pieces)
    qkv = of.noise(tokens, of.heads + 2 * of.kv_heads)
    q, k, v = qkv.split_with_sizes((of.heads, of.kv_heads, of.kv_heads), dim=1)
    plan.append_kv(1, k, v)
    got, first = plan.run(1, q), 0
    for (_, new), (before_k, before_v) in zip(pieces, earlier, strict=True):
        mine = slice(first, first + new)
        exact = expected(q[mine], torch.cat((before_k, k[mine])), torch.cat((before_v, v[mine])))
        torch.testing.assert_close(got[mine].double(), exact, rtol=2**-6, atol=2**-6)
        first += new


def test_a_token_is_the_same_alone_in_a_batch_and_behind_others_of_its_sequence(level):
    of = Sequences(3, group=3, kv_heads=2, head_dim=64, page_size=16)
    slices = [of.slice(61, 6), of.slice(200, 1), of.slice(0, 2)]
    of.fill(slices)
    q, k, v = of.noise(9, of.heads), of.noise(9, of.kv_heads), of.noise(9, of.kv_heads)
    plan = of.plan(slices)
    plan.append_kv(1, k, v)
    together = plan.run(1, q)
    for index in range(6):
        alone = of.plan([SequenceSlice([1], 61 + index, slices[0].pages)])
        assert torch.equal(alone.run(1, q[index : index + 1]), together[index : index + 1])
    assert torch.equal(of.plan(slices[1:2]).run(1, q[6:7]), together[6:7])


def test_a_long_context_and_the_widest_heads_attend_in_blocks(level):
    of = Sequences(5, group=2, kv_heads=1, head_dim=256, page_size=16)
    slices = [of.slice(700, 150)]
    (before,) = of.fill(slices)
    q, k, v = of.noise(150, 2), of.noise(150, 1), of.noise(150, 1)
    plan = of.plan(slices)
    plan.append_kv(1, k, v)
    exact = expected(q, *(torch.cat(pair) for pair in zip(before, (k, v), strict=True)))
    torch.testing.assert_close(plan.run(1, q).double(), exact, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("step", [0.02, 0.3, -0.3, 3.0])
def test_scores_that_grow_or_fall_along_the_context_are_weighed_right(level, step):
    of = Sequences(6, group=1, kv_heads=1, head_dim=64, page_size=16)
    piece = of.slice(0, 300)
    q = torch.full((300, 1, 64), 0.125).bfloat16()
    k = (of.noise(300, 1) * 0.5 + step * torch.arange(300)[:, None, None]).bfloat16()
    v = of.noise(300, 1)
    plan = of.plan([piece])
    plan.append_kv(1, k, v)
    torch.testing.assert_close(plan.run(1, q).double(), expected(q, k, v), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("new", [1, 40])
def test_a_key_that_is_not_a_number_spoils_its_own_sequence_alone(level, new):
    of = Sequences(4, group=2, kv_heads=1, head_dim=16, page_size=8)
    slices = [of.slice(9, new), of.slice(9, new)]
    of.fill(slices)
    k, v = of.noise(2 * new, 1), of.noise(2 * new, 1)
    k[0] = float("nan")
    plan = of.plan(slices)
    plan.append_kv(1, k, v)
    got = plan.run(1, of.noise(2 * new, 2))
    assert got[:new].isnan().all()
    assert not got[new:].isnan().any()
