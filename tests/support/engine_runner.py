"""A model run step by step over a pool, and the reference's logits to hold it to."""

import random

import torch
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.kv_pool import KVPool

VOCABULARY = 199


def tokens_of(count, seed=0, vocabulary=VOCABULARY):
    return [random.Random(seed * 10_007 + index).randrange(vocabulary) for index in range(count)]


@torch.inference_mode()
def reference_logits(reference, tokens):
    return reference(torch.tensor([tokens])).logits[0]


class Sequence:
    """One sequence in a pool: its tokens, how many of them have run, and its shuffled pages."""

    def __init__(self, tokens, pages):
        self.tokens, self.pages, self.done = tokens, pages, 0

    def next(self, count):
        piece = SequenceSlice(self.tokens[self.done : self.done + count], self.done, self.pages)
        self.done += count
        return piece


class Runner:
    """A model with a pool whose pages are dealt in random order and begin full of NaN, as if left by another."""

    def __init__(self, model, page_size=16, pages=80, seed=0):
        self.model, self.page_size = model, page_size
        self.pool = KVPool(model.kv_layout(page_size), pages)
        self.pool.tensor.fill_(float("nan"))
        self.order = random.Random(seed).sample(range(pages), pages)

    def sequence(self, tokens, room=0):
        count = -(-(len(tokens) + room) // self.page_size)
        taken, self.order = self.order[:count], self.order[count:]
        assert len(taken) == count
        return Sequence(list(tokens), taken)

    def step(self, *slices, **options):
        return self.model.forward(ForwardBatch.build(slices, page_size=self.page_size), self.pool, **options)


def close(ours, reference):
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)
