"""kvferry's engine: the step that a decoder runs, sampling included, and the pass that a prefiller runs."""

import time
from pathlib import Path

import torch
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.sampler import SamplingBatch, SamplingRow, sample
from kvferry_engine.weights import load_model

from engine_bench.cases import CONTEXT, prompt

PAGE_SIZE = 16


class Ours:
    """The engine over a pool that holds the largest case."""

    name = "ours"

    def __init__(self, folder: Path, tokens: int, chunk: int) -> None:
        self._model = load_model(folder, "bfloat16")
        self._pool = KVPool(self._model.kv_layout(PAGE_SIZE), -(-tokens // PAGE_SIZE) + 1)
        self._chunk = chunk

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step has to read."""
        return sum(tensor.nbytes for tensor in self._model.parameters.targets.values())

    def prefill(self, tokens: int) -> float:
        """All passes, and the first token: a prefiller leaves that to the decoder, the other systems' times have it."""
        began = time.perf_counter()
        self._draw(self._prefill(prompt(tokens), self._pages(0, tokens)), tokens)
        return time.perf_counter() - began

    def _prefill(self, tokens: list[int], pages: list[int]) -> torch.Tensor:
        """Return the last token's logits, [1, vocabulary]."""
        logits = None
        for start in range(0, len(tokens), self._chunk):
            last = start + self._chunk >= len(tokens)
            logits = self._run([SequenceSlice(tokens[start : start + self._chunk], start, pages, want_logits=last)])
        return logits

    def decode(self, batch: int, steps: int) -> float:
        room = CONTEXT + steps
        tables = [self._pages(index, room) for index in range(batch)]
        for index, table in enumerate(tables):
            self._prefill(prompt(CONTEXT, index), table)
        tokens = [1] * batch
        began = time.perf_counter()
        for step in range(steps):
            tokens = self._step(tokens, CONTEXT + step, tables)
        return time.perf_counter() - began

    def _step(self, tokens: list[int], position: int, tables: list[list[int]]) -> list[int]:
        rows = zip(tokens, tables, strict=True)
        return self._draw(self._run([SequenceSlice([token], position, pages) for token, pages in rows]), position)

    @staticmethod
    def _draw(logits: torch.Tensor, position: int) -> list[int]:
        row = SamplingRow(temperature=0, top_k=0, top_p=1, seed=0, position=position, logprobs=None)
        drawn: list[int] = sample(logits, SamplingBatch.build([row] * len(logits))).tokens.tolist()
        return drawn

    def _run(self, slices: list[SequenceSlice]) -> torch.Tensor:
        return self._model.forward(ForwardBatch.build(slices, page_size=PAGE_SIZE), self._pool)

    @staticmethod
    def _pages(index: int, tokens: int) -> list[int]:
        count = -(-tokens // PAGE_SIZE)
        return list(range(index * count, (index + 1) * count))
