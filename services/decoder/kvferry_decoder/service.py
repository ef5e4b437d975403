"""The decoder: takes assignments, waits for their KV, and decodes them together, step after step.

Never stops to prefill: a prompt's KV comes from a prefiller, and the few prompts that are too short for that share a
token budget per step. All bookkeeping runs in the event loop's thread; a step computes in the forward thread.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry_engine.grammar import GrammarCompiler
from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_fabric import RegionHandle
from kvferry_node.channels import Origin, Post
from kvferry_node.logs import get_logger
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.message import Refused
from kvferry_proto.nodes import Load, NodeRef
from kvferry_proto.timeline import now
from kvferry_proto.to_decoder import Assign, Cancel, CancelConfirmed, PrefillFailed, PrefillReport
from kvferry_proto.usage import FinishReason

from kvferry_decoder.answers import Answers, DrawnRun
from kvferry_decoder.assignment import why_not
from kvferry_decoder.batch_loop import BatchLoop
from kvferry_decoder.grammar_desk import GrammarDesk
from kvferry_decoder.intake import Incoming, Intake
from kvferry_decoder.receiver import Receiver
from kvferry_decoder.request import Request, State
from kvferry_decoder.scheduler import Scheduler
from kvferry_decoder.settings import DecoderSettings
from kvferry_decoder.slots import SlotPool
from kvferry_decoder.speculation import Speculation
from kvferry_decoder.verifier import Verifier


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
            local_prefill=settings.local_prefill_tokens,
            speculation=Speculation(settings.speculate, settings.draft_tokens, worker.max_context),
        )
        self._context = worker.new_context_slots(settings.slots) if settings.speculate == "mtp" else None
        self.receiver = Receiver(
            worker.fabric,
            worker.register,
            worker.allocator,
            SlotPool(settings.slots),
            self._register_context if self._context is not None else None,
        )
        self._settings = settings
        self._answers = Answers()
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._admitted: list[str] = []
        self._loop = BatchLoop(
            worker,
            self.scheduler,
            metrics,
            admit=self._admit,
            on_drawn=self._on_drawn,
            on_broken=self._on_broken,
            on_refused=self._on_refused,
        )
        self._grammars = GrammarDesk(
            GrammarCompiler(Path(worker.settings.model), worker.config.vocab_size),
            on_ready=self._on_compiled,
            on_refused=self._on_refused,
        )
        self._verifier = Verifier(worker, metrics, on_equal=self._join, on_different=self._on_different)
        self.draining = False

    def connect(self, post: Post) -> None:
        """Give the channels to prefillers, and listen to the fabric. Before any message is handled."""
        self._post = post
        self.intake = Intake(
            self._worker,
            self.receiver,
            post,
            name=self._ref.id,
            transfer_seconds=self._settings.transfer_seconds,
            retry_seconds=self._settings.cancel_retry_seconds,
            on_ready=self._on_ready,
            on_failure=self._fail,
            surrender=self.scheduler.surrender,
            context=self._context,
        )
        self._worker.fabric.attach(asyncio.get_running_loop(), self._on_event)

    def _register_context(self) -> RegionHandle:
        assert self._context is not None
        return self._worker.fabric.register(self._context.shared)

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
        self._loop.wake()

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
        self._loop.wake()

    def _note_timeline(self, report: PrefillReport) -> None:
        request = self._requests.get(report.request_id)
        if request is not None:
            request.prefill_timeline = report.timeline
            request.cached = report.timeline.cached

    def _on_event(self, event: Any) -> None:  # noqa: ANN401  # kvferry_fabric.Event
        self.intake.on_event(event)
        self._loop.wake()

    def _assign(self, origin: Origin, message: Assign) -> None:
        request = Request.from_assign(message, origin, self._arrivals)
        self._arrivals += 1
        request.timeline.assigned = now()
        error = self._why_not(message)
        if error is not None:
            self._metrics.ended.labels("refused").inc()
            self._answers.failed(request, error)
            return
        self._requests[request.id] = request
        self._admitted.append(request.id)
        if message.grammar is None:
            self.scheduler.add(request)
        else:
            self._grammars.begin(request, message.grammar)

    def _why_not(self, message: Assign) -> RequestError | None:
        if message.request_id in self._requests:
            return self._error(ErrorCode.BAD_REQUEST, f"request id {message.request_id} is in use here", Phase.ASSIGN)
        if self.draining:
            return self._error(ErrorCode.DRAINING, "this decoder is shutting down", Phase.ASSIGN)
        if message.grammar is not None and self._grammars.full:
            text = "this decoder compiles as many grammars as it may"
            return self._error(ErrorCode.OVERLOADED, text, Phase.ASSIGN)
        return why_not(message, self._worker, self.scheduler, self._ref.id)

    def _error(self, code: ErrorCode, text: str, phase: Phase) -> RequestError:
        return RequestError(code=code, message=text, phase=phase, node=self._ref.id)

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

    def _on_broken(self, request: Request, why: str) -> None:
        self._fail(request, self._error(ErrorCode.INTERNAL, why, Phase.DECODE))

    def _on_refused(self, request: Request, why: str) -> None:
        self._fail(
            request, self._error(ErrorCode.BAD_REQUEST, f"the answer can't be held to its grammar: {why}", Phase.ASSIGN)
        )

    def _on_compiled(self, request: Request) -> None:
        if request.drawing.complete:
            # What another decoder had answered is the whole answer.
            self._answers.accepted(request)
            self._end(request, State.FINISHED, "finished")
            self._answers.finished(request, FinishReason.STOP)
            return
        request.machine.move(State.WAITING)
        self.scheduler.add(request)
        self._loop.wake()

    # --- into the batch, and out of it -----------------------------------------------------------------------

    async def run(self) -> None:
        """Decode until cancelled."""
        await self._loop.run()

    def _admit(self) -> None:
        while admitted := self.scheduler.admit(self.receiver.can_expect()):
            for request in admitted:
                self._answers.accepted(request)
                request.timeline.reserved = request.timeline.reserved or now()
                if request.state is State.RECEIVING:
                    self.intake.begin(request)
                else:
                    request.timeline.joined = request.timeline.joined or now()

    def _on_ready(self, incoming: Incoming) -> None:
        self._metrics.transfers.labels("arrived").inc()
        if self._settings.verify_kv:
            self._verifier.begin(incoming)
        else:
            self._join(incoming)

    def _join(self, incoming: Incoming) -> None:
        self.scheduler.arrived(incoming.request)
        incoming.request.timeline.joined = now()
        self._loop.wake()

    def _on_different(self, incoming: Incoming, difference: str) -> None:
        text = f"KV from prefiller {incoming.transfer.peer.ref.id} is not what it sent: {difference}"
        self._fail(incoming.request, self._error(ErrorCode.VERIFY_FAILED, text, Phase.TRANSFER))

    def _on_drawn(self, drawn: list[DrawnRun]) -> None:
        for entry in drawn:
            if entry.finish is not None:
                self._end(entry.request, State.FINISHED, "finished")
        self._answers.step(drawn)
        self._drop_unreachable()

    # --- the cluster -----------------------------------------------------------------------------------------

    def _drop_unreachable(self) -> None:
        gone = set(self._answers.unreachable())
        if gone:
            self._drop(lambda request: request.origin.key in gone)

    def _drop(self, of_lost_router: Callable[[Request], bool]) -> None:
        for request in [request for request in self._requests.values() if of_lost_router(request)]:
            self._log.info("router gone: cancelling", request_id=request.id)
            self._stop(request)

    def node_left(self, ref: NodeRef) -> None:
        """A node's lease has ended, or it has restarted."""
        self.intake.prefiller_lost(ref)
        self._drop(lambda request: request.origin.sender == ref)
        self._loop.wake()

    async def housekeeping(self, alive: Callable[[NodeRef], bool], seconds: float = 0.25) -> None:
        """Look after deadlines and lost peers until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            self.intake.sweep(alive)
            self._drop_unreachable()
            self._loop.wake()

    def stood_still(self, seconds: float) -> None:
        """This node was taken for lost meanwhile: whatever it had is done elsewhere.

        What peers said may never come, so nothing can be waited for.
        """
        text = f"decoder {self._ref.id} stood still for {seconds:.1f} s, longer than its lease"
        for request in list(self._requests.values()):
            self._fail(request, self._error(ErrorCode.NODE_LOST, text, Phase.DECODE))

    def load(self) -> Load:
        """What placement weighs. Reservations end with `admitted`, so that whoever is here has to count."""
        waiting = [*self.scheduler.waiting, *self._compiling()]
        promised = sum(self._worker.layout.pages_for(len(request.tokens)) for request in waiting)
        return Load(
            free_pages=max(0, self._worker.allocator.free_pages - promised),
            running=len(self.scheduler.running) + len(self.scheduler.receiving),
            waiting=len(waiting),
            queued_tokens=sum(request.uncomputed - 1 for request in self.scheduler.running),
        )

    def _compiling(self) -> list[Request]:
        return [request for request in self._requests.values() if request.state is State.COMPILING]

    def admitted(self) -> list[str]:
        """Requests taken since the last call: they are part of `load` now."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def states(self) -> dict[str, int]:
        """Requests by state, for metrics."""
        scheduler = self.scheduler
        return {
            "compiling": len(self._compiling()),
            "waiting": len(scheduler.waiting),
            "receiving": len(scheduler.receiving),
            "running": len(scheduler.running),
        }

    def held(self) -> dict[str, int]:
        """Everything that must be zero when idle."""
        stats = self._worker.fabric.stats()
        return {
            "requests": len(self._requests),
            "leaving": len(self.scheduler.leaving),
            "held_pages": self._worker.allocator.held_pages,
            "quarantined_pages": self._worker.allocator.quarantined_pages,
            "slots": self.receiver.slots.held,
            "incoming": len(self.intake),
            "checks": len(self._verifier),
            "armed_slots": stats.armed_slots,
            "active_transfers": stats.active_transfers,
            "in_flight_writes": stats.in_flight_writes,
        }

    def under_way(self) -> bool:
        """Whether a request is here, or was and a step, a check or a prefiller's word is still to come."""
        return bool(self._requests or self.scheduler.leaving or len(self._verifier) or self.receiver.transfers)

    def fail_rest(self, code: ErrorCode, why: str) -> None:
        """Give up what has not ended: the time to drain is over, or a rank is lost. Routers go on elsewhere."""
        for request in list(self._requests.values()):
            self._fail(request, self._error(code, f"this decoder was shut down: {why}", Phase.DECODE))

    def close(self) -> None:
        """Stop listening to the fabric and close the channels; memory keys go with the fabric."""
        self._verifier.close()
        self._grammars.close()
        self._loop.close()
        self._worker.fabric.detach()
        self._post.close()
