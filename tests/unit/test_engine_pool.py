import ctypes

import pytest
import torch
from kvferry_engine.errors import PageError
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.kv_size import pages_for_bytes
from kvferry_proto.layout import KVLayout

LAYOUT = KVLayout(model="m", dtype="float32", layers=3, kv_heads=2, head_dim=8, page_size=4)


def test_shape_strides_and_size():
    with KVPool(LAYOUT, 5) as pool:
        assert pool.tensor.shape == (3, 5, 2, 2, 4, 8)
        assert pool.tensor.is_contiguous()
        assert pool.page_stride == LAYOUT.page_bytes == 2 * 2 * 4 * 8 * 4
        assert pool.layer_stride == 5 * LAYOUT.page_bytes
        assert len(pool.buffer) == pool.tensor.nbytes
        assert not pool.tensor.any()


def test_the_buffer_is_the_tensor_and_is_aligned():
    with KVPool(LAYOUT, 5) as pool:
        assert pool.tensor.data_ptr() % 4096 == 0
        assert ctypes.addressof(ctypes.c_char.from_buffer(pool.buffer)) == pool.tensor.data_ptr()


def test_a_page_is_one_run_of_bytes():
    with KVPool(LAYOUT, 5) as pool:
        pool.tensor[2, 3] = torch.arange(128.0).view(2, 2, 4, 8)
        assert pool.page_offset(2, 3) == 2 * pool.layer_stride + 3 * pool.page_stride
        assert torch.equal(torch.frombuffer(bytearray(pool.page(2, 3)), dtype=torch.float32), torch.arange(128.0))
        pool.page(1, 4)[:4] = b"\x00\x00\x80\x3f"
        assert pool.tensor[1, 4, 0, 0, 0, 0] == 1


def test_a_rank_holds_its_heads():
    with KVPool(
        KVLayout(model="m", dtype="bfloat16", layers=1, kv_heads=4, head_dim=8, page_size=4, ranks=2), 2
    ) as pool:
        assert pool.tensor.shape == (1, 2, 2, 2, 4, 8)
        assert pool.tensor.dtype == torch.bfloat16


def test_a_page_of_latents_is_one_vector_a_token():
    layout = KVLayout(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=6, page_size=4, ranks=4, latent=True)
    with KVPool(layout, 3) as pool:
        assert pool.tensor.shape == (2, 3, 1, 1, 4, 6)
        assert pool.page_stride == 4 * 6 * 4
        pool.tensor[1, 2] = torch.arange(24.0).view(4, 6)
        assert torch.equal(torch.frombuffer(bytearray(pool.page(1, 2)), dtype=torch.float32), torch.arange(24.0))


@pytest.mark.parametrize(("layer", "page"), [(3, 0), (0, 5), (-1, 0), (0, -1)])
def test_a_page_that_is_not_there_is_refused(layer, page):
    with KVPool(LAYOUT, 5) as pool, pytest.raises(PageError, match="outside a pool of 5 pages"):
        pool.page(layer, page)


def test_a_closed_pool_says_so():
    pool = KVPool(LAYOUT, 5)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        _ = pool.tensor


def test_a_view_outlives_the_pool():
    pool = KVPool(LAYOUT, 5)
    page = pool.page(0, 1)
    page[0] = 7
    pool.close()
    assert page[0] == 7


def test_pages_for_bytes():
    assert pages_for_bytes(LAYOUT, 10 * 3 * LAYOUT.page_bytes + 1) == 10
    with pytest.raises(ValueError, match="at least one page"):
        KVPool(LAYOUT, pages_for_bytes(LAYOUT, 100))
