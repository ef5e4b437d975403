"""The loop around the batch: plan a step, compute it, hand out what it drew."""

import asyncio
import functools
from collections.abc import Callable

from kvferry_engine.grammar import GrammarError, Masker
from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_node.logs import get_logger
from kvferry_proto.timeline import now

from kvferry_decoder import step
from kvferry_decoder.answers import DrawnRun
from kvferry_decoder.request import Request, State
from kvferry_decoder.scheduler import Scheduler, StepSlice


class BatchLoop:
    """Runs a step whenever somebody runs, sleeps otherwise. A step computes in the forward thread."""

    def __init__(
        self,
        worker: Worker,
        scheduler: Scheduler,
        metrics: WorkerMetrics,
        *,
        admit: Callable[[], None],
        on_drawn: Callable[[list[DrawnRun]], None],
        on_broken: Callable[[Request, str], None],
        on_refused: Callable[[Request, str], None],
    ) -> None:
        """`admit` is called before each step and while one computes. `on_broken` says which request failed in a step,
        and why; `on_refused` whose grammar took too much."""
        self._worker = worker
        self._scheduler = scheduler
        self._metrics = metrics
        self._admit = admit
        self._on_drawn = on_drawn
        self._on_broken = on_broken
        self._on_refused = on_refused
        self._masker = Masker(worker.config.vocab_size)
        self._work = asyncio.Event()
        self._stepping = False
        self._looking = False

    def wake(self) -> None:
        """Something has changed: there may be a step to run, and somebody to admit.

        Nobody waits for a step's end to be admitted: a prefiller that is asked at once begins that much earlier.
        """
        self._work.set()
        if self._stepping and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self._stepping:
            self._admit()

    async def run(self) -> None:
        """Decode until cancelled."""
        while True:
            self._admit()
            slices = self._scheduler.plan_step()
            if not slices:
                self._work.clear()
                await self._work.wait()
                continue
            await self._step(slices)

    def close(self) -> None:
        """End the thread that computes masks."""
        self._masker.close()

    async def _step(self, slices: list[StepSlice]) -> None:
        began = now()
        self._stepping = True
        try:
            drawn = await self._compute(slices)
        except Exception as error:  # noqa: BLE001  # whatever breaks a step fails its requests, not the decoder
            get_logger().exception("a decode step failed", exc_info=error)
            self._scheduler.give_up_step(slices)
            for piece in slices:
                self._on_broken(piece.request, f"the forward pass failed: {error}")
            return
        finally:
            self._stepping = False
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe((now() - began) / 1e9)
        self._scheduler.finish_step(slices)
        drawing = [piece for piece in slices if piece.draws]
        self._metrics.tokens.labels("prefilled").inc(sum(piece.tokens for piece in slices) - len(drawing))
        self._hand_out(drawing, drawn)

    async def _compute(self, slices: list[StepSlice]) -> list[step.Run]:
        inputs = step.plan(slices, by_model=self._scheduler.speculation.by_model)
        masks = self._masker.begin(inputs.matchers)
        return await self._worker.compute(functools.partial(step.run, self._worker, inputs, masks))

    def _hand_out(self, drawing: list[StepSlice], drawn: list[step.Run]) -> None:
        told = []
        for piece, run in zip(drawing, drawn, strict=True):
            running = piece.request.state is State.RUNNING
            if running and (entry := self._take(piece.request, run)) is not None:
                told.append(entry)
                self._accept(piece, len(entry.tokens) - 1)
                piece.request.guesses, piece.request.context = run.guesses, None
        self._metrics.tokens.labels("drawn").inc(sum(len(entry.tokens) for entry in told))
        self._on_drawn(told)

    def _take(self, request: Request, run: step.Run) -> DrawnRun | None:
        """Add tokens to their request, up to one that ends it; None if the request failed by them."""
        try:
            request.drawing.check()
            if run.tokens[0] < 0:
                self._scheduler.pages.doubt(request)
                self._on_broken(request, "the model's logits are not numbers")
                return None
            request.timeline.first_token = request.timeline.first_token or now()
            count, finish = request.extend(run.tokens, self._worker.max_context)
            return DrawnRun(request, run.tokens[:count], run.logprobs[:count], finish)
        except GrammarError as error:
            self._on_refused(request, str(error))
            return None

    def _accept(self, piece: StepSlice, right: int) -> None:
        """Count the drafts of a slice, of which so many have become tokens of the answer."""
        if not piece.drafts:
            return
        self._scheduler.accept(piece.request, right)
        piece.request.timeline.drafted += len(piece.drafts)
        piece.request.timeline.accepted += right
        self._metrics.show_drafts(len(piece.drafts), right)
