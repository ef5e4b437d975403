"""Guesses of the model's drafting layer (MTP), at the end of a step, in the forward thread.

Whether or not guesses are wanted, the layer passes over every position whose next token the step has told: later
guesses attend to what it keeps of them. The first guess comes of that; each further one of its own output and guess.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from kvferry_engine.batch import SequenceSlice
from kvferry_engine.worker import Worker


class Ask(NamedTuple):
    """What guessing after a step needs of a slice that draws."""

    position: int
    """Of the last token that was known before the step."""
    token: int
    """That token."""
    pages: list[int]
    rows: int
    """Hidden states that the step gives for the slice: after that token, and after each draft."""
    most: int
    """Guesses wanted."""
    context: torch.Tensor | None
    """Hidden state of the position before, [E], if the drafting layer has not passed over it yet."""


class _Sequence(NamedTuple):
    """A sequence that goes on."""

    place: int
    """Among those asked for."""
    position: int
    """Where the drafting layer stands."""
    pages: list[int]
    most: int


def guess(worker: Worker, asks: Sequence[Ask], drawn: Sequence[Sequence[int]], hidden: torch.Tensor) -> list[list[int]]:
    """Guess what follows the tokens `drawn` after the hidden states, [all rows, E]; one list for each of `asks`.

    A sequence whose logits were not numbers is left out: nothing is guessed for it.
    """
    guesses: list[list[int]] = [[] for _ in asks]
    slices, states, sequences = [], [], []
    first = 0
    for index, (ask, tokens) in enumerate(zip(asks, drawn, strict=True)):
        if tokens[0] >= 0:
            slices.append(_known(ask, tokens))
            states += [] if ask.context is None else [ask.context.unsqueeze(0).to(hidden.device)]
            states.append(hidden[first : first + len(tokens)])
            sequences.append(_Sequence(index, ask.position + len(tokens), ask.pages, ask.most))
        first += ask.rows
    if slices:
        out, logits = worker.draft(slices, torch.cat(states))
        _go_on(worker, [each for each in sequences if each.most], guesses, out, logits)
    return guesses


def _known(ask: Ask, tokens: Sequence[int]) -> SequenceSlice:
    """Each position with the token after it."""
    before = [] if ask.context is None else [ask.token]
    return SequenceSlice([*before, *tokens], ask.position - len(before), ask.pages, int(ask.most > 0))


def _go_on(
    worker: Worker,
    sequences: list[_Sequence],
    guesses: list[list[int]],
    out: torch.Tensor,
    logits: torch.Tensor | None,
) -> None:
    """Add guess after guess, from the layer's output after each of `sequences`, [sequences, E]."""
    while sequences and logits is not None:
        tokens = logits.argmax(dim=-1).tolist()
        for sequence, token in zip(sequences, tokens, strict=True):
            guesses[sequence.place].append(token)
        more = [row for row, sequence in enumerate(sequences) if sequence.most > len(guesses[sequence.place])]
        if not more:
            return
        slices = [SequenceSlice([tokens[row]], sequences[row].position, sequences[row].pages) for row in more]
        sequences = [sequences[row]._replace(position=sequences[row].position + 1) for row in more]
        out, logits = worker.draft(slices, out[more])
