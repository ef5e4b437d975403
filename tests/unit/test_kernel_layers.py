"""Layers run as one against the same layers run operation by operation: the same bits, in logits and in the pool."""

import pytest
import torch
from engine_runner import VOCABULARY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_levels import level, needs_kernels
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.kernels import AMX
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models.dense_stack import DenseStack
from kvferry_engine.weights import load_model
from random_models import build_random

pytestmark = needs_kernels
fixtures = (level,)
PAGES, PAGE_SIZE = 100, 4
# Neither whole vectors nor whole pieces of work.
SHAPES = [
    ("llama", {"hidden_size": 72, "head_dim": 32, "intermediate_size": 1100}),
    ("llama", {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "kv_heads": 1}),
    ("qwen3", {"hidden_size": 40, "head_dim": 64, "intermediate_size": 530, "kv_heads": 4}),
]


@pytest.fixture(params=[1, 2, 5], ids=lambda count: f"{count}-threads")
def _threads(request):
    """As many threads, of which some sleep where there are more than cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]['hidden_size']}")
def models(request, level, tmp_path, monkeypatch):
    """The same model twice: as one, and operation by operation."""
    kind, fields = request.param
    build_random(tmp_path, kind, **fields)
    as_one = load_model(tmp_path, "bfloat16")
    with monkeypatch.context() as patched:
        patched.setattr(DenseStack, "of", lambda *_: None)
        return as_one, load_model(tmp_path, "bfloat16")


def pool_of(model, page_size=PAGE_SIZE):
    pool = KVPool(model.kv_layout(page_size), PAGES)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def slices(counts, starts, page_size=PAGE_SIZE):
    """Sequences of so many new tokens, whose pages lie anywhere."""
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(2)).tolist()
    made = []
    for index, (count, start) in enumerate(zip(counts, starts, strict=True)):
        pages = [free.pop() for _ in range(-(-(start + count) // page_size))]
        made.append(SequenceSlice([(7 + index + i) % VOCABULARY for i in range(count)], start, pages))
    return made


def assert_same(models, batch):
    """The two models give the same logits and leave the same pool."""
    pools = [pool_of(model, batch.page_size) for model in models]
    got, expected = (model.forward(batch, pool) for model, pool in zip(models, pools, strict=True))
    assert torch.equal(got, expected)
    assert torch.equal(pools[0].tensor, pools[1].tensor)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("counts", "starts"),
    [((1,), (0,)), ((1,), (9,)), ((1, 1, 1), (8, 3, 30)), ((4, 1, 2), (5, 0, 12)), ((1,) * 16, range(16))],
    ids=["first", "alone", "three", "drafts", "sixteen"],
)
def test_layers_as_one_give_what_their_operations_give(models, counts, starts):
    batch = ForwardBatch.build(slices(counts, starts), page_size=PAGE_SIZE)
    assert_same(models, batch)


def test_some_rows_of_the_last_layer_are_finished(models):
    """Of a sequence with drafts only some tokens are judged."""
    pieces = [SequenceSlice([5, 6, 7], 2, [3, 4], want_logits=2), SequenceSlice([8, 9], 0, [1], want_logits=0)]
    batch = ForwardBatch.build(pieces, page_size=PAGE_SIZE)
    got, expected = (model.forward(batch, pool_of(model)) for model in models)
    assert got.shape[0] == 2
    assert torch.equal(got, expected)


def test_whoever_asks_for_layers_is_told_of_each(models):
    batch = ForwardBatch.build(slices((2,), (3,)), page_size=PAGE_SIZE)
    told = []
    got = models[0].forward(batch, pool_of(models[0]), told.append)
    assert told == [0, 1, 2]
    assert torch.equal(got, models[0].forward(batch, pool_of(models[0])))


# New tokens and computed ones of each sequence; up to 17 new ones attend one by one.
CHUNKS = {
    "one": ((18,), (0,)),
    "whole-tiles": ((64,), (0,)),
    "several": ((33, 50, 18), (0, 7, 60)),
    "beside-rows": ((1, 40, 3, 21, 1), (9, 0, 2, 13, 40)),
    "blocks": ((150, 1, 120), (3, 30, 0)),
    "rows-alone": ((17, 17, 17, 17), (0, 1, 20, 8)),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("case", CHUNKS)
def test_chunks_as_one_give_what_their_operations_give(models, case):
    assert_same(models, ForwardBatch.build(slices(*CHUNKS[case]), page_size=PAGE_SIZE))


@given(
    st.sampled_from([8, 16, 64]), st.lists(st.tuples(st.integers(1, 70), st.integers(0, 80)), min_size=1, max_size=5)
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_step_as_one_gives_what_its_operations_give(models, page_size, sequences):
    assert_same(models, ForwardBatch.build(slices(*zip(*sequences, strict=True), page_size), page_size=page_size))


def test_logits_of_every_token_of_a_chunk(models):
    assert_same(
        models, ForwardBatch.build([SequenceSlice(range(30), 0, range(8), want_logits=30)], page_size=PAGE_SIZE)
    )


def test_a_layers_keys_are_in_the_pool_when_it_is_told_of(models):
    """And no later layer's: a decoder's pages are sent as layers become ready."""
    batch = ForwardBatch.build(slices((70, 1), (5, 9)), page_size=PAGE_SIZE)
    pool, whole, before = (pool_of(models[0]) for _ in range(3))
    models[0].forward(batch, whole)
    told = []

    def on_layer(layer):
        told.append(layer)
        assert torch.equal(pool.tensor[: layer + 1], whole.tensor[: layer + 1])
        assert torch.equal(pool.tensor[layer + 1 :], before.tensor[layer + 1 :])

    models[0].forward(batch, pool, on_layer)
    assert told == [0, 1, 2]


def test_chunks_are_run_as_one_with_amx_alone(models, level, monkeypatch):
    ran = []
    attend = DenseStack.attend
    monkeypatch.setattr(DenseStack, "attend", lambda *args: ran.append(1) or attend(*args))
    models[0].forward(ForwardBatch.build(slices((40,), (5,)), page_size=PAGE_SIZE), pool_of(models[0]))
    assert ran == [1] * (level == AMX)
