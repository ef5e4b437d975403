"""Decode steps that are replayed as CUDA graphs give the logits of those that are not, whatever the batch."""

import importlib.util
import time

import torch
from kvferry_engine.batch import ForwardBatch
from kvferry_engine.decode_graphs import DecodeGraphs, can_capture

from gpu_checks import DEVICE, Skip, must
from gpu_checks.models import Sequences, folder, prompts

STEPS = 24
CLOSE = 0.02


class Replayed(Sequences):
    """Sequences whose decode steps are replayed."""

    graphs: DecodeGraphs | None = None
    replays = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        self.graphs = self.graphs or DecodeGraphs(self.model, self.pool)
        if not self.graphs.fits(batch):
            return super().forward(batch)
        self.replays += 1
        return self.graphs.run(batch)


def run() -> str:
    if importlib.util.find_spec("flashinfer") is None:
        msg = "flashinfer is not installed: pip install -e '.[cuda]'"
        raise Skip(msg)
    texts = prompts(199)
    with folder("llama") as path:
        plain = Sequences(path, "bfloat16", DEVICE, texts, room=STEPS, attention="flashinfer")
        replayed = Replayed(path, "bfloat16", DEVICE, texts, room=STEPS, attention="flashinfer")
    must(can_capture(replayed.model), "the model can't be captured")
    took = [0.0, 0.0]
    for _ in range(STEPS):
        rows = []
        for place, way in enumerate((plain, replayed)):
            began = time.perf_counter()
            rows.append(way.step())
            took[place] = time.perf_counter() - began
        for index, row in rows[0].items():
            error = float((rows[1][index] - row).abs().max() / row.abs().max())
            must(error < CLOSE, f"sequence {index} is off by {error:.3f}")
            for way in (plain, replayed):
                way.texts[index].append(int(row.argmax()))
    must(replayed.replays > STEPS // 2, f"only {replayed.replays} steps were replayed")
    plain.close()
    replayed.close()
    return f"{replayed.replays} steps; the last took {took[1] * 1e3:.2f} ms, and {took[0] * 1e3:.2f} ms without a graph"
