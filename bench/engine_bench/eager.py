"""The reference implementation's eager loop."""

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engine_bench.cases import CONTEXT, prompt


class Eager:
    """transformers, one forward call a step, its own cache."""

    name = "eager"

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        ids = torch.tensor([prompt(tokens)])
        began = time.perf_counter()
        self._model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return time.perf_counter() - began

    @torch.inference_mode()
    def decode(self, batch: int, steps: int) -> float:
        cache = DynamicCache()
        self._model(torch.tensor([prompt(CONTEXT, index) for index in range(batch)]), past_key_values=cache)
        tokens = torch.ones(batch, 1, dtype=torch.int64)
        began = time.perf_counter()
        for _ in range(steps):
            logits = self._model(tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - began
