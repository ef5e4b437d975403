"""A product per head, whatever the dtype, and however many heads are widened at a time."""

import pytest
import torch
from kvferry_engine.models import linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widened", [1, 400, 1 << 21])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_each_head_has_a_matrix_of_its_own(monkeypatch, dtype, widened, tokens):
    monkeypatch.setattr(linear, "WIDENED", widened)
    generator = torch.Generator().manual_seed(tokens)
    x, whole = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, tokens, 12), (7, 20, 16)))
    weights = whole[:, 4:16]  # Not dense: what a head makes keys of lies between what it makes values of.
    ours = linear.multiply_each(x, weights)
    assert (ours.dtype, ours.shape) == (dtype, (7, tokens, 16))
    exact = torch.bmm(x.double(), weights.double())
    torch.testing.assert_close(ours.double(), exact, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)
