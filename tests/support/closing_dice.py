"""Answers drawn at random under grammars, that come to an end: the dice favour whatever leads out."""

import torch
from kvferry_engine.grammar import Masker


def _favour(text):
    """How much a token helps an answer to end: what closes helps most, what opens least.

    Quotes come before brackets, which strings may hold; `@` is what addresses cannot end without.
    """
    if text == '"' or text.strip("]}") == '"':
        return 4
    if text == "@":
        return 3.5
    if not text.strip("]}"):
        return 3
    if text in set(",.:-TDHMSWYZ"):
        return 2
    return -1 if set(text) & set("[{\\ĠĊĉč") else 0


class Dice:
    """Random logits: slices of one long noise, and from the token `patience` on a favour for the ways out."""

    def __init__(self, tokenizer, vocabulary, ends, *, seed, patience):
        self._random = torch.Generator().manual_seed(seed)
        self._vocabulary = vocabulary
        self._noise = torch.randn(4 * vocabulary, generator=self._random)
        self._favour = torch.zeros(vocabulary)
        for text, token in tokenizer.get_vocab().items():
            self._favour[token] = 5 if token in ends else _favour(text)
        self._patience = patience

    def throw(self, rows, step):
        """Logits [rows, V] for the token at `step`."""
        starts = torch.randint(0, 3 * self._vocabulary, (rows,), generator=self._random).tolist()
        logits = torch.stack([self._noise[start : start + self._vocabulary] for start in starts])
        return logits.add_(self._favour, alpha=max(0.0, (step - self._patience) / 2))


def draw(matchers, dice, vocabulary, ends, *, most):
    """Draw until every matcher is complete, or `most` tokens; return each one's tokens without the end token."""
    masker = Masker(vocabulary)
    answers = [[] for _ in matchers]
    for step in range(most):
        active = [index for index, matcher in enumerate(matchers) if not matcher.complete]
        if not active:
            break
        masks = masker.fill([(row, matchers[index]) for row, index in enumerate(active)])
        drawn = masks.apply(dice.throw(len(active), step)).argmax(-1).tolist()
        for index, token in zip(active, drawn, strict=True):
            matchers[index].advance([token])
            answers[index] += [] if token in ends else [token]
    masker.close()
    return answers
