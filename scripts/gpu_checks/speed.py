"""How fast the default model decodes and prefills."""

import statistics
import time

import numpy as np
import torch
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.default_model import prepare_default_model
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models import Model
from kvferry_engine.weights import load_model

from gpu_checks import DEVICE

CONTEXT = 512
PAGE_SIZE = 16
ROUNDS = 20


def _seconds(model: Model, pool: KVPool, slices: list[SequenceSlice]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        model.forward(ForwardBatch.build(slices, page_size=PAGE_SIZE, device=DEVICE), pool)
        torch.cuda.synchronize(DEVICE)
        times.append(time.perf_counter() - began)
    return statistics.median(times[ROUNDS // 4 :])


def run() -> str:
    model = load_model(prepare_default_model(), "bfloat16", device=DEVICE)
    each = CONTEXT // PAGE_SIZE
    found = []
    with KVPool(model.kv_layout(PAGE_SIZE), 64 * each, device=DEVICE) as pool:
        for batch in (1, 8, 64):
            slices = [SequenceSlice([9], CONTEXT - 1, range(row * each, (row + 1) * each)) for row in range(batch)]
            found.append(f"decode at batch {batch}: {batch / _seconds(model, pool, slices):.0f} tokens/s")
        prompt = SequenceSlice(np.arange(CONTEXT) + 100, 0, range(each))
        found.append(f"prefill of {CONTEXT}: {CONTEXT / _seconds(model, pool, [prompt]):.0f} tokens/s")
    return ", ".join(found)
