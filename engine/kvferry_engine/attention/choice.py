"""Which attention a model is run with."""

import importlib.util
from typing import Literal

import torch

from kvferry_engine.attention import AttentionBackend
from kvferry_engine.attention.flashinfer_cuda import FlashInferAttention, supports
from kvferry_engine.attention.torch_cpu import TorchAttention
from kvferry_engine.config import ModelConfig
from kvferry_engine.devices import on_gpu
from kvferry_engine.errors import ModelError
from kvferry_engine.shard import Shard

Wanted = Literal["auto", "torch", "flashinfer"]


def attention_for(
    config: ModelConfig, shard: Shard, dtype: torch.dtype, device: str, wanted: Wanted = "auto"
) -> AttentionBackend:
    """Return FlashInfer on a GPU, where it is installed and has kernels for the model, and plain torch elsewhere.

    Raises ModelError where FlashInfer is asked for and can't be had.
    """
    why = _why_not(config, dtype, device)
    if wanted == "torch" or (wanted == "auto" and why):
        return TorchAttention()
    if why:
        msg = f"--attention flashinfer: {why}"
        raise ModelError(msg)
    return FlashInferAttention(config, shard, device)


def _why_not(config: ModelConfig, dtype: torch.dtype, device: str) -> str:
    if not on_gpu(device):
        return "it runs on GPUs alone"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed (pip install 'kvferry[cuda]')"
    return "" if supports(config, dtype) else f"it has no kernels for this model's heads in {dtype}"
