"""Small random models of every architecture, and how they answer on a device."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from kvferry_engine.attention.choice import Wanted
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models import Model
from kvferry_engine.weights import load_model

from gpu_checks import Skip

KINDS = ("llama", "qwen3", "qwen3_moe", "deepseek")
PAGE_SIZE = 16
CHUNK = 24
LENGTHS = (1, 15, 16, 17, 61, 100)


@contextmanager
def folder(kind: str) -> Iterator[Path]:
    """Make a model's folder; Skip where the reference implementation, which makes it, is not installed."""
    try:
        import random_models  # noqa: PLC0415 - of tests/support
        import tiny_deepseek  # noqa: PLC0415
    except ImportError as error:
        msg = f"{error}: pip install -e '.[dev]'"
        raise Skip(msg) from error
    with TemporaryDirectory() as name:
        if kind == "deepseek":
            tiny_deepseek.save(tiny_deepseek.build(kv_lora_rank=512, qk_rope_head_dim=64), name)
        else:
            random_models.build_random(name, kind, head_dim=64)
        yield Path(name)


def prompts(vocabulary: int) -> list[list[int]]:
    """Prompts whose lengths lie around pages and chunks."""
    numbers = random.Random(0)
    return [[numbers.randrange(vocabulary) for _ in range(length)] for length in LENGTHS]


class Sequences:
    """Sequences in a pool of their own, whose pages begin full of NaN, as if left by another."""

    def __init__(
        self, path: Path, dtype: str, device: str, texts: Sequence[list[int]], *, room: int, attention: Wanted = "torch"
    ) -> None:
        self.model: Model = load_model(path, dtype, device=device, attention=attention)
        self.device, self.texts, self.done = device, [list(text) for text in texts], [0] * len(texts)
        counts = [-(-(len(text) + room) // PAGE_SIZE) for text in texts]
        self.pool = KVPool(self.model.kv_layout(PAGE_SIZE), sum(counts), device=device)
        self.pool.tensor.fill_(float("nan"))
        order = random.Random(1).sample(range(sum(counts)), sum(counts))
        self.pages = [[order.pop() for _ in range(count)] for count in counts]

    def step(self) -> dict[int, torch.Tensor]:
        """Run the next tokens of every sequence; float32 logits [V] on the host of those that have run to their end."""
        slices, ended = [], []
        for index, text in enumerate(self.texts):
            piece = text[self.done[index] : self.done[index] + CHUNK]
            if piece:
                self.done[index] += len(piece)
                wanted = self.done[index] == len(text)
                start = self.done[index] - len(piece)
                slices.append(SequenceSlice(piece, start, self.pages[index], want_logits=wanted))
                ended += [index] if wanted else []
        if not slices:
            return {}
        logits = self.forward(ForwardBatch.build(slices, page_size=PAGE_SIZE, device=self.device))
        return dict(zip(ended, logits.cpu(), strict=True)) if logits is not None else {}

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Compute a step."""
        return self.model.forward(batch, self.pool)

    def close(self) -> None:
        """Give the pool back."""
        self.pool.close()


Answer = list[tuple[int, float]]
"""Tokens, each with the margin of its logit over the next best."""


def answers(path: Path, dtype: str, device: str, texts: Sequence[list[int]], count: int) -> list[Answer]:
    """Decode greedily: of each prompt `count` tokens."""
    sequences = Sequences(path, dtype, device, texts, room=count)
    given: list[Answer] = [[] for _ in texts]
    while True:
        logits = sequences.step()
        for index, row in logits.items():
            best = row.topk(2)
            if len(given[index]) < count:
                given[index].append((int(best.indices[0]), float(best.values[0] - best.values[1])))
                sequences.texts[index].append(given[index][-1][0])
        if all(len(each) == count for each in given):
            sequences.close()
            return given
