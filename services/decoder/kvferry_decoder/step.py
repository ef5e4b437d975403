"""One decode step: forward pass and sampling, in the forward thread."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvferry_engine.batch import SequenceSlice
from kvferry_engine.grammar import Matcher, TokenMasks
from kvferry_engine.sampler import Sampled, SamplingBatch, SamplingRow, sample
from kvferry_engine.worker import Worker
from kvferry_proto.to_router import TokenLogprobs

from kvferry_decoder.drafting import Ask, guess
from kvferry_decoder.scheduler import StepSlice

# JSON has no infinity; a masked token's log probability is told as this.
LEAST_LOGPROB = -9999.0


class Run(NamedTuple):
    """What a step drew for one slice: each draft that was right, and one token more."""

    tokens: list[int]
    """Never empty; one below 0, alone, where the logits were not numbers."""
    logprobs: list[TokenLogprobs]
    """One for each token, or none."""
    guesses: Sequence[int] = ()
    """What the drafting layer says of the tokens after these."""


class StepPlan(NamedTuple):
    """A step's inputs, copied out of the requests, so that the forward thread touches none of them."""

    slices: list[SequenceSlice]
    drafts: list[Sequence[int]]
    """Of each slice that draws."""
    rows: list[SamplingRow]
    """For each slice that draws: the row after its last token, and those after its drafts."""
    matchers: list[tuple[int, Matcher]]
    """Rows that have a grammar, and their places in it. Nobody else touches those before the step returns."""
    asks: list[Ask]
    """What the drafting layer needs of each slice that draws; [] where nothing is guessed so."""


def plan(slices: list[StepSlice], *, by_model: bool = False) -> StepPlan:
    """Gather the inputs, in the event loop's thread. `by_model`: the drafting layer takes part."""
    drawing = [piece for piece in slices if piece.draws]
    rows: list[SamplingRow] = []
    matchers: list[tuple[int, Matcher]] = []
    for piece in drawing:
        matchers += list(enumerate(piece.request.drawing.matchers(piece.drafts), start=len(rows)))
        rows += piece.request.rows(piece.drafts)
    asks = [_ask(piece) for piece in drawing] if by_model else []
    return StepPlan([_sequence(piece) for piece in slices], [piece.drafts for piece in drawing], rows, matchers, asks)


def run(worker: Worker, inputs: StepPlan, masks: "Future[TokenMasks] | None" = None) -> list[Run]:
    """Compute the step, in the forward thread; `masks` are computed meanwhile. One run for each slice that draws."""
    hidden, logits = worker.judge(inputs.slices) if inputs.asks else (None, worker.forward(inputs.slices))
    if logits is None:
        return []
    sampled = sample(logits, SamplingBatch.build(inputs.rows), None if masks is None else masks.result())
    runs = list(_runs(inputs, sampled))
    if hidden is None:
        return runs
    guesses = guess(worker, inputs.asks, [run.tokens for run in runs], hidden)
    return [run._replace(guesses=found) for run, found in zip(runs, guesses, strict=True)]


def _ask(piece: StepSlice) -> Ask:
    request = piece.request
    return Ask(
        position=len(request.tokens) - 1,
        token=request.tokens[-1],
        pages=list(request.pages),
        rows=1 + len(piece.drafts),
        most=piece.further,
        context=request.context,
    )


def _sequence(piece: StepSlice) -> SequenceSlice:
    request, start, count, drafts, _ = piece
    end = start + count
    return SequenceSlice(
        tokens=[*request.tokens[start:end], *drafts],
        start=start,
        pages=list(request.pages),
        want_logits=1 + len(drafts) if piece.draws else 0,
        following=request.tokens[end] if end < len(request.tokens) else None,
    )


def _runs(inputs: StepPlan, sampled: Sampled) -> Iterator[Run]:
    tokens, logprobs = sampled.tokens.tolist(), _on_wire(sampled)
    # Rows of which nothing is known. The first row of a request then fails it; a later one is drawn again as a first.
    lost = {row for row, matcher in inputs.matchers if matcher.failure}
    lost |= {row for row, token in enumerate(tokens) if token < 0}
    first = 0
    for drafts in inputs.drafts:
        end = first + 1
        for draft in drafts:
            if draft != tokens[end - 1] or end in lost:
                break
            end += 1
        told = [entry for entry in logprobs[first:end] if entry is not None]
        yield Run(tokens[first:end], told)
        first += 1 + len(drafts)


def _on_wire(sampled: Sampled) -> list[TokenLogprobs | None]:
    return [
        None
        if entry is None
        else TokenLogprobs(
            token,
            max(entry.chosen, LEAST_LOGPROB),
            [(other, max(value, LEAST_LOGPROB)) for other, value in entry.top],
        )
        for token, entry in zip(sampled.tokens.tolist(), sampled.logprobs, strict=True)
    ]
