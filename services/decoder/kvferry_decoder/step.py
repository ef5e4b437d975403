"""One decode step: forward pass and sampling, in the forward thread."""

from concurrent.futures import Future
from typing import NamedTuple

from kvferry_engine.batch import SequenceSlice
from kvferry_engine.grammar import Matcher, TokenMasks
from kvferry_engine.sampler import Sampled, SamplingBatch, SamplingRow, sample
from kvferry_engine.worker import Worker
from kvferry_proto.to_router import TokenLogprobs

from kvferry_decoder.scheduler import StepSlice

# JSON has no infinity; a masked token's log probability is told as this.
LEAST_LOGPROB = -9999.0


class Drawn(NamedTuple):
    """What a step drew: one token for each slice that draws, in order."""

    tokens: list[int]
    """Below 0 where the logits were not numbers."""
    logprobs: list[TokenLogprobs | None]


class StepPlan(NamedTuple):
    """A step's inputs, copied out of the requests, so that the forward thread touches none of them."""

    slices: list[SequenceSlice]
    rows: list[SamplingRow]
    matchers: list[tuple[int, Matcher]]
    """Rows that have a grammar, and their places in it. Nobody else touches those before the step returns."""


def plan(slices: list[StepSlice]) -> StepPlan:
    """Gather the inputs, in the event loop's thread."""
    drawing = [piece.request for piece in slices if piece.draws]
    return StepPlan(
        [_sequence(piece) for piece in slices],
        [request.row() for request in drawing],
        [(row, request.drawing.matcher) for row, request in enumerate(drawing) if request.drawing.matcher is not None],
    )


def run(worker: Worker, inputs: StepPlan, masks: "Future[TokenMasks] | None" = None) -> Drawn:
    """Compute the step, in the forward thread; `masks` are computed meanwhile."""
    logits = worker.forward(inputs.slices)
    if logits is None:
        return Drawn([], [])
    sampled = sample(logits, SamplingBatch.build(inputs.rows), None if masks is None else masks.result())
    return Drawn(sampled.tokens.tolist(), _on_wire(sampled))


def _sequence(piece: StepSlice) -> SequenceSlice:
    request, start, count = piece
    end = start + count
    return SequenceSlice(
        tokens=request.tokens[start:end],
        start=start,
        pages=list(request.pages),
        want_logits=piece.draws,
        following=request.tokens[end] if end < len(request.tokens) else None,
    )


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
