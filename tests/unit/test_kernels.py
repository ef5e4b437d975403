"""The C kernels against torch in double or float32, at each set of instructions that the processor has."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_levels import found, level, needs_kernels
from kvferry_engine.kernels import AMX, AVX512
from torch.nn import functional

pytestmark = needs_kernels
fixtures = (level,)
anything = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
ROUNDED_TWICE = {"rtol": 2**-7, "atol": 1e-5}
seeds = st.integers(0, 1000)


@pytest.fixture
def own_level(level):
    """A level that has a product of many rows of its own."""
    if level == AVX512:
        pytest.skip("many rows are the library's there")


def drawn(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@anything
@given(seed=seeds, rows=st.integers(1, 33), outputs=st.integers(1, 100), inputs=st.integers(1, 200))
def test_a_product_is_that_in_float32_rounded_once(level, seed, rows, outputs, inputs):
    x, weight = drawn(seed, (rows, inputs), (outputs, inputs))
    exact = functional.linear(x.double(), weight.double())
    got = found.few_rows(x, weight)
    assert got.dtype == torch.bfloat16
    # One rounding to 8 bits, and what float32 sums lose where large terms cancel.
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-4)


@anything
@given(seed=seeds, rows=st.integers(1, 40), outputs=st.integers(1, 100), inputs=st.integers(1, 700))
def test_a_product_of_many_rows_is_that_in_float32_rounded_once(own_level, seed, rows, outputs, inputs):
    x, weight = drawn(seed, (rows, inputs), (outputs, inputs))
    exact = functional.linear(x.double(), weight.double())
    # One term after the other: more is lost than in few_rows, which adds eight sums.
    torch.testing.assert_close(found.many_rows(x, weight).double(), exact, rtol=2**-8, atol=5e-4)


@pytest.mark.parametrize("rows", [17, 600])
def test_a_row_of_a_large_product_is_the_same_whatever_is_beside_it(own_level, rows):
    x, weight = drawn(3, (rows, 600), (70, 600))
    together = found.many_rows(x, weight)
    for first, last in ((0, 1), (1, 6), (5, 17), (rows - 4, rows)):
        assert torch.equal(found.many_rows(x[first:last], weight), together[first:last])


def test_a_large_product_is_the_same_on_any_number_of_threads(own_level):
    x, weight = drawn(4, (500, 64), (48, 64))
    before = torch.get_num_threads()
    one_after_the_other = found.many_rows(x, weight)
    try:
        torch.set_num_threads(16)
        assert torch.equal(found.many_rows(x, weight), one_after_the_other)
    finally:
        torch.set_num_threads(before)


def test_what_is_not_a_number_spoils_its_own_row_and_output_of_a_large_product(own_level):
    x, weight = torch.ones(20, 40).bfloat16(), torch.ones(40, 40).bfloat16()
    x[3, 9] = weight[33, 9] = float("nan")
    got = found.many_rows(x, weight)
    assert got[3].isnan().all()
    assert got[:, 33].isnan().all()
    assert got.isnan().sum() == 20 + 40 - 1


@pytest.mark.parametrize("outputs", [48, 577])
@pytest.mark.parametrize("inputs", [576, 100])
def test_a_row_of_a_product_is_the_same_whatever_is_beside_it(level, outputs, inputs):
    x, weight = drawn(1, (21, inputs), (outputs, inputs))
    together = found.few_rows(x, weight)
    for rows in (1, 2, 4, 7):
        for first in range(0, 21, rows):
            part = slice(first, first + rows)
            assert torch.equal(found.few_rows(x[part], weight), together[part])


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 70, 96), (40, 33, 100), (600, 70, 600)])
def test_with_tiles_few_rows_and_many_are_one_product(level, rows, outputs, inputs):
    if level != AMX:
        pytest.skip("two kernels there, which add up in other orders")
    x, weight = drawn(5, (rows, inputs), (outputs, inputs))
    assert torch.equal(found.few_rows(x, weight), found.many_rows(x, weight))


def test_rows_that_lie_apart_are_taken_as_they_are(level):
    x, weight = drawn(2, (4, 64), (10, 32))
    assert torch.equal(found.few_rows(x[:, ::2], weight), found.few_rows(x[:, ::2].contiguous(), weight))


def test_what_is_not_a_number_stays_so(level):
    weight = torch.ones(3, 16).bfloat16()
    weight[1, 5] = float("nan")
    got = found.few_rows(torch.ones(2, 16).bfloat16(), weight)
    assert got[:, 1].isnan().all()
    assert not got[:, ::2].isnan().any()
    weight[1, 5] = float("inf")
    assert (found.few_rows(torch.ones(2, 16).bfloat16(), weight)[:, 1] == float("inf")).all()
    x = torch.tensor([[float("nan"), 1.0]]).bfloat16()
    assert found.rms_norm(x.unsqueeze(1), x, 1e-6).isnan().all()
    assert found.silu_times(torch.tensor([[float("nan"), 1, 1, float("nan")]]).bfloat16()).isnan().all()
    assert found.silu_times(torch.tensor([[float("-inf"), -200.0, 1, 1]]).bfloat16())[0, 1].abs() < 1e-30


@anything
@given(
    seed=seeds,
    tokens=st.integers(1, 9),
    heads=st.tuples(st.integers(1, 5), st.integers(0, 3)),
    size=st.integers(1, 150),
    apart=st.integers(0, 40),
)
def test_a_norm_is_rounded_before_and_after_its_weight(level, seed, tokens, heads, size, apart):  # noqa: PLR0917
    whole, weights = drawn(seed, (tokens, sum(heads) * size + apart), (2, size))
    x = whole[:, : sum(heads) * size].unflatten(1, (sum(heads), size))
    scale = (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    which = torch.tensor([0] * heads[0] + [1] * heads[1])
    expected = (x.float() * scale).bfloat16() * weights[which]
    # Sums of squares that differ in the last bit may turn both roundings, each by one of 2**-7 at most.
    torch.testing.assert_close(found.rms_norm(x, weights, 1e-5, heads[0]), expected, rtol=2**-6, atol=1e-5)


@anything
@given(seed=seeds, rows=st.integers(1, 9), size=st.integers(1, 150), large=st.sampled_from([1, 30]))
def test_silu_times(level, seed, rows, size, large):
    (gate_up,) = drawn(seed, (rows, 2 * size))
    gate, up = (large * gate_up.float()).bfloat16().chunk(2, dim=-1)
    expected = functional.silu(gate.double()) * up.double()
    got = found.silu_times(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(got.double(), expected, **ROUNDED_TWICE)


@anything
@given(seed=seeds, tokens=st.integers(1, 9), heads=st.integers(1, 5), half=st.integers(1, 80), apart=st.integers(0, 9))
def test_rotation(level, seed, tokens, heads, half, apart):  # noqa: PLR0917
    whole, cos, sin = drawn(seed, (tokens, heads, 2 * half + apart), (tokens, 1, 2 * half), (tokens, 1, 2 * half))
    x = whole[..., : 2 * half]
    expected = x.double() * cos.double() + x.double().roll(half, dims=-1) * sin.double()
    torch.testing.assert_close(found.rotate(x, cos, sin).double(), expected, rtol=2**-7, atol=1e-4)
