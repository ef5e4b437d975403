import pytest
import torch
from kvferry_engine.models.few_rows import few_rows
from torch.nn import functional

product = few_rows()
pytestmark = pytest.mark.skipif(product is None, reason="no AVX2 here, or the extension was not built")


@pytest.mark.parametrize("outputs", [1, 2, 3, 47, 48, 49, 577])
@pytest.mark.parametrize("inputs", [1, 7, 8, 100, 576])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
def test_equals_the_product_in_float32_rounded_once(rows, outputs, inputs):
    draw = torch.Generator().manual_seed(rows * 1000 + outputs + inputs)
    x = torch.randn(rows, inputs, generator=draw).bfloat16()
    weight = torch.randn(outputs, inputs, generator=draw).bfloat16()
    exact = functional.linear(x.double(), weight.double())
    got = product(x, weight)
    assert got.dtype == torch.bfloat16
    # One rounding to 8 bits, and what float32 sums lose where large terms cancel.
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-4)


def test_rows_that_lie_apart_are_taken_as_they_are():
    x = torch.randn(4, 64).bfloat16()
    weight = torch.randn(10, 32).bfloat16()
    torch.testing.assert_close(product(x[:, ::2], weight), product(x[:, ::2].contiguous(), weight))


def test_what_is_not_a_number_stays_so():
    weight = torch.ones(3, 16).bfloat16()
    weight[1, 5] = float("nan")
    got = product(torch.ones(2, 16).bfloat16(), weight)
    assert got[:, 1].isnan().all()
    assert not got[:, ::2].isnan().any()
