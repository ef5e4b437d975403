"""The decoder: takes assignments, waits for their KV, and decodes them together, step after step.

Never stops to prefill: a prompt's KV comes from a prefiller, and the few prompts that are too short for that share a
token budget per step. All bookkeeping runs in the event loop's thread; a step computes in the forward thread.
"""

import asyncio
import functools
from typing import Any

from kvferry_engine.checksums import first_difference
from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_node.channels import Origin, Post
from kvferry_node.logs import get_logger
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Refused
from kvferry_proto.nodes import Load, NodeRef
from kvferry_proto.timeline import now
from kvferry_proto.to_decoder import Assign, Cancel, CancelConfirmed, PrefillFailed, PrefillReport
from kvferry_proto.usage import FinishReason

from kvferry_decoder import step
from kvferry_decoder.answers import Answers, DrawnToken
from kvferry_decoder.intake import Incoming, Intake
from kvferry_decoder.receiver import Receiver
from kvferry_decoder.request import Request, State
from kvferry_decoder.scheduler import Scheduler, StepSlice
from kvferry_decoder.settings import DecoderSettings
from kvferry_decoder.slots import SlotPool

# A refused router may try again after about the time that a short answer takes to end.
_RETRY_AFTER_SECONDS = 1.0


class DecoderService:
    """Joins scheduler, intake and answers. `post` is given after construction: its handler is a method of this."""

    def __init__(self, worker: Worker, settings: DecoderSettings, ref: NodeRef, metrics: WorkerMetrics) -> None:
        self._worker = worker
        self._ref = ref
        self._metrics = metrics
        self._log = get_logger()
        self.scheduler = Scheduler(
            worker.allocator,
            worker.layout,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            prefill_budget=settings.prefill_budget,
        )
        self.receiver = Receiver(
            worker.fabric,
            worker.register,
            worker.allocator,
            SlotPool(settings.slots),
        )
        self._settings = settings
        self._answers = Answers()
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._admitted: list[str] = []
        self._work = asyncio.Event()
        self._checks: set[asyncio.Task[None]] = set()
        self.draining = False

    def connect(self, post: Post) -> None:
        """Give the channels to prefillers, and listen to the fabric. Before any message is handled."""
        self._post = post
        self.intake = Intake(
            self._worker,
            self.receiver,
            post,
            transfer_seconds=self._settings.transfer_seconds,
            retry_seconds=self._settings.cancel_retry_seconds,
            on_ready=self._on_ready,
            on_failure=self._fail,
            surrender=self.scheduler.surrender,
        )
        self._worker.fabric.attach(asyncio.get_running_loop(), self._on_event)

    # --- messages --------------------------------------------------------------------------------------------

    def on_message(self, origin: Origin, message: Any) -> None:  # noqa: ANN401  # a member of FromRouter
        """Handle a message at the inbox."""
        match message:
            case Assign():
                self._assign(origin, message)
            case Cancel():
                self._cancel(origin, message)
            case _:
                # PrefillReport and its kin come back on our own channels; at the inbox they are from nobody we asked.
                self._log.warning("unexpected at the inbox", type=type(message).__name__, sender=str(origin.sender))
        self._work.set()

    def on_prefiller(self, origin: Origin, message: Any) -> None:  # noqa: ANN401  # a member of FromPrefiller
        """Handle an answer on a channel to a prefiller."""
        match message:
            case PrefillReport():
                self._note_timeline(message)
                self.intake.on_report(origin, message)
            case CancelConfirmed():
                self.intake.on_confirmed(origin, message)
            case PrefillFailed():
                self.intake.on_failed(origin, message)
            case Refused():
                self.intake.on_refused(origin, message)
        self._work.set()

    def _note_timeline(self, report: PrefillReport) -> None:
        request = self._requests.get(report.request_id)
        if request is not None:
            request.prefill_timeline = report.timeline

    def _on_event(self, event: Any) -> None:  # noqa: ANN401  # kvferry_fabric.Event
        self.intake.on_event(event)
        self._work.set()

    def _assign(self, origin: Origin, message: Assign) -> None:
        request = Request.from_assign(message, origin, self._arrivals)
        self._arrivals += 1
        request.timeline.assigned = now()
        error = self._why_not(request)
        if error is not None:
            self._metrics.ended.labels("refused").inc()
            self._answers.failed(request, error)
            return
        self._requests[request.id] = request
        self._admitted.append(request.id)
        self.scheduler.add(request)

    def _why_not(self, request: Request) -> RequestError | None:
        """Why an assignment can't be taken, or None."""
        longest = min(self._worker.max_context, self.scheduler.capacity_tokens)
        if request.id in self._requests:
            return self._error(ErrorCode.BAD_REQUEST, f"request id {request.id} is in use here")
        if not request.tokens:
            return self._error(ErrorCode.BAD_REQUEST, "a prompt needs at least one token")
        if not 0 <= min(request.tokens) <= max(request.tokens) < self._worker.config.vocab_size:
            return self._error(ErrorCode.BAD_REQUEST, f"token ids must lie in 0..{self._worker.config.vocab_size - 1}")
        if len(request.tokens) >= longest:
            text = f"{len(request.tokens)} tokens leave no room for an answer within {longest}"
            return self._error(ErrorCode.PROMPT_TOO_LONG, text)
        if self.draining:
            return self._error(ErrorCode.DRAINING, "this decoder is shutting down")
        if not self.scheduler.can_add():
            return self._error(ErrorCode.OVERLOADED, "this decoder's queue is full", _RETRY_AFTER_SECONDS)
        return None

    def _error(self, code: ErrorCode, text: str, retry_after: float | None = None) -> RequestError:
        return RequestError(code=code, message=text, phase=Phase.ASSIGN, node=self._ref.id, retry_after=retry_after)

    def _cancel(self, origin: Origin, message: Cancel) -> None:
        request = self._requests.get(message.request_id)
        if request is not None and request.origin.sender == origin.sender:
            self._stop(request)
            self._answers.cancelled(request)

    # --- ways out --------------------------------------------------------------------------------------------

    def _stop(self, request: Request) -> None:
        """End a request that nobody wants any more."""
        self._end(request, State.CANCELLED, "cancelled")

    def _fail(self, request: Request, error: RequestError) -> None:
        if request.machine.final:
            return
        self._log.warning(
            "request failed", request_id=request.id, code=error.code, phase=error.phase, why=error.message
        )
        self._end(request, State.FAILED, error.code)
        self._answers.failed(request, error)

    def _end(self, request: Request, state: State, how: str) -> None:
        if request.state is State.RECEIVING:
            self.intake.call_off(request)
        self.scheduler.end(request, state)
        del self._requests[request.id]
        self._metrics.ended.labels(how).inc()

    # --- arrival ---------------------------------------------------------------------------------------------

    def _on_ready(self, incoming: Incoming) -> None:
        self._metrics.transfers.labels("arrived").inc()
        if not self._settings.verify_kv:
            self._join(incoming.request)
            return
        task = asyncio.ensure_future(self._verify(incoming))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _verify(self, incoming: Incoming) -> None:
        """Compare the pages with their source before anything is computed from them, or written beside them."""
        request, theirs = incoming.request, incoming.checksums
        pages = request.pages[: self._worker.layout.pages_for(len(request.tokens) - 1)]
        mine = await self._worker.checksums(pages)
        if request.state is not State.RECEIVING:
            return
        difference = first_difference(mine, theirs or Int32s(), len(pages))
        self._metrics.verified.labels("equal" if difference is None else "different").inc(len(mine))
        if difference is None:
            self._join(request)
            return
        text = f"KV from prefiller {incoming.transfer.peer.ref.id} is not what it sent: {difference}"
        self._fail(
            request,
            RequestError(code=ErrorCode.VERIFY_FAILED, message=text, phase=Phase.TRANSFER, node=self._ref.id),
        )

    def _join(self, request: Request) -> None:
        self.scheduler.arrived(request)
        request.timeline.joined = now()
        self._work.set()

    # --- the loop --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decode until cancelled: a step whenever somebody runs, sleep otherwise."""
        while True:
            self._admit()
            slices = self.scheduler.plan_step()
            if not slices:
                self._work.clear()
                await self._work.wait()
                continue
            await self._step(slices)

    def _admit(self) -> None:
        while admitted := self.scheduler.admit(self.receiver.can_expect()):
            for request in admitted:
                self._answers.accepted(request)
                request.timeline.reserved = request.timeline.reserved or now()
                if request.state is State.RECEIVING:
                    self.intake.begin(request)
                else:
                    request.timeline.joined = request.timeline.joined or now()

    async def _step(self, slices: list[StepSlice]) -> None:
        inputs = step.plan(slices)
        began = now()
        try:
            drawn = await self._worker.compute(functools.partial(step.run, self._worker, inputs))
        except Exception as error:  # noqa: BLE001  # whatever breaks a step fails its requests, not the decoder
            self._log.exception("a decode step failed", exc_info=error)
            self.scheduler.finish_step(slices)
            self._fail_all(slices, f"the forward pass failed: {error}")
            return
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe((now() - began) / 1e9)
        draws = [piece for piece in slices if piece.draws]
        self._metrics.tokens.labels("prefilled").inc(sum(piece.tokens for piece in slices) - len(draws))
        self.scheduler.finish_step(slices)
        self._take(draws, drawn)

    def _fail_all(self, slices: list[StepSlice], why: str) -> None:
        for piece in slices:
            self._fail(
                piece.request,
                RequestError(code=ErrorCode.INTERNAL, message=why, phase=Phase.DECODE, node=self._ref.id),
            )

    def _take(self, draws: list[StepSlice], drawn: step.Drawn) -> None:
        """Hand the drawn tokens out, and end the requests that are through."""
        told = []
        for piece, token, logprobs in zip(draws, drawn.tokens, drawn.logprobs, strict=True):
            request = piece.request
            if request.state is not State.RUNNING:
                continue
            if token < 0:
                self._fail_all([piece], "the model's logits are not numbers")
                continue
            request.timeline.first_token = request.timeline.first_token or now()
            finish = request.append(token) or self._at_limit(request)
            told.append(DrawnToken(request, token, logprobs, finish))
            if finish is not None:
                self._end(request, State.FINISHED, "finished")
        self._metrics.tokens.labels("drawn").inc(len(told))
        self._answers.step(told)
        self._drop_unreachable()

    def _at_limit(self, request: Request) -> FinishReason | None:
        return FinishReason.LENGTH if len(request.tokens) >= self._worker.max_context else None

    def _drop_unreachable(self) -> None:
        gone = set(self._answers.unreachable())
        if gone:
            self._drop(lambda request: request.origin.key in gone)

    def _drop(self, of_lost_router: Any) -> None:  # noqa: ANN401  # a predicate over requests
        for request in [request for request in self._requests.values() if of_lost_router(request)]:
            self._log.info("router gone: cancelling", request_id=request.id)
            self._stop(request)

    # --- the cluster -----------------------------------------------------------------------------------------

    def node_left(self, ref: NodeRef) -> None:
        """A node's lease has ended, or it has restarted."""
        self.intake.prefiller_lost(ref)
        self._drop(lambda request: request.origin.sender == ref)
        self._work.set()

    async def housekeeping(self, alive: Any, seconds: float = 0.25) -> None:  # noqa: ANN401  # NodeRef -> bool
        """Look after deadlines and lost peers until cancelled."""
        while True:
            before = now()
            await asyncio.sleep(seconds)
            self._if_given_up((now() - before) / 1e9)
            self.intake.sweep(alive)
            self._drop_unreachable()
            self._work.set()

    def _if_given_up(self, away: float) -> None:
        """A node that stood still for longer than its lease was taken for lost: whatever it had is done elsewhere.

        What peers said meanwhile may never come, so nothing can be waited for.
        """
        if away < self._settings.lease_seconds:
            return
        text = f"decoder {self._ref.id} stood still for {away:.1f} s, longer than its lease"
        error = RequestError(code=ErrorCode.NODE_LOST, message=text, phase=Phase.DECODE, node=self._ref.id)
        for request in list(self._requests.values()):
            self._fail(request, error)

    def load(self) -> Load:
        """What placement weighs."""
        waiting = self.scheduler.waiting
        promised = sum(self._worker.layout.pages_for(len(request.tokens)) for request in waiting)
        return Load(
            free_pages=max(0, self._worker.allocator.free_pages - promised),
            running=len(self.scheduler.running) + len(self.scheduler.receiving),
            waiting=len(waiting),
            queued_tokens=sum(request.uncomputed - 1 for request in self.scheduler.running),
        )

    def admitted(self) -> list[str]:
        """Requests taken since the last call: they are part of `load` now."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def states(self) -> dict[str, int]:
        """Requests by state, for metrics."""
        scheduler = self.scheduler
        return {
            "waiting": len(scheduler.waiting),
            "receiving": len(scheduler.receiving),
            "running": len(scheduler.running),
        }

    def held(self) -> dict[str, int]:
        """Everything that must be zero when idle."""
        stats = self._worker.fabric.stats()
        return {
            "requests": len(self._requests),
            "held_pages": self._worker.allocator.held_pages,
            "quarantined_pages": self._worker.allocator.quarantined_pages,
            "slots": self.receiver.slots.held,
            "incoming": len(self.intake),
            "checks": len(self._checks),
            "armed_slots": stats.armed_slots,
            "active_transfers": stats.active_transfers,
            "in_flight_writes": stats.in_flight_writes,
        }

    def fail_rest(self) -> None:
        """Give up what has not ended when the time to drain is over; routers go on elsewhere."""
        for request in list(self._requests.values()):
            self._fail(request, self._error(ErrorCode.DRAINING, "this decoder was shut down"))

    def close(self) -> None:
        """Stop listening to the fabric and close the channels; memory keys go with the fabric."""
        for task in self._checks:
            task.cancel()
        self._worker.fabric.detach()
        self._post.close()
