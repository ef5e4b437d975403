"""Weights lie one behind the other, and each is its own."""

import torch
from kvferry_engine.models.weight_memory import BLOCK, WeightMemory


def test_tensors_share_blocks_and_no_byte():
    memory = WeightMemory()
    shapes = [(300, 577), (7,), (1000, 64), (BLOCK // 2 + 2,), (513, 129)]
    tensors = [memory.zeros(shape, torch.bfloat16) for shape in shapes]
    for index, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(index + 1)
    assert all((tensor == index + 1).all() for index, tensor in enumerate(tensors))
    assert tensors[2].data_ptr() - tensors[0].data_ptr() < 2 * tensors[0].nbytes


def test_a_block_outlives_who_made_it():
    tensor = WeightMemory().zeros((256, 256), torch.float32)
    tensor.fill_(3)
    assert tensor.sum() == 3 * 256 * 256
