"""The decoder: takes assignments, waits for their KV, and decodes them together, step after step.

Never stops to prefill: a prompt's KV comes from a prefiller, and the few prompts that are too short for that share a
token budget per step. All bookkeeping runs in the event loop's thread; a step computes in the forward thread.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_engine.worker_service import WorkerService
from kvferry_fabric import Event
from kvferry_node.channels import Handler, Origin, Post
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef, Role
from kvferry_proto.timeline import now
from kvferry_proto.to_decoder import Assign, Cancel, CancelConfirmed, PrefillFailed, PrefillReport
from kvferry_proto.usage import FinishReason

from kvferry_decoder.answers import Answers, DrawnRun
from kvferry_decoder.batch_loop import BatchLoop
from kvferry_decoder.census import Census
from kvferry_decoder.entrance import Entrance
from kvferry_decoder.intake import Incoming, Intake
from kvferry_decoder.parts import make_receiver, make_scheduler
from kvferry_decoder.request import Request, State
from kvferry_decoder.settings import DecoderSettings
from kvferry_decoder.verifier import Verifier

OpenPost = Callable[[Handler, Callable[[NodeRef], None]], Post]


class DecoderService(WorkerService[str, Request]):
    """Joins scheduler, intake and answers."""

    role, entry, work = Role.DECODER, Phase.ASSIGN, Phase.DECODE
    _loop: BatchLoop

    def __init__(
        self,
        worker: Worker,
        settings: DecoderSettings,
        ref: NodeRef,
        metrics: WorkerMetrics,
        open_post: OpenPost,
    ) -> None:
        """`open_post` makes the channels to prefillers, with a handler of answers and one of returns after a break."""
        super().__init__(worker, ref, metrics)
        context = worker.new_context_slots(settings.slots) if settings.speculate == "mtp" else None
        self.scheduler = make_scheduler(worker, settings)
        self.receiver = make_receiver(worker, settings, context)
        self._verify = settings.verify_kv
        self._answers = Answers()
        self._post = open_post(self._on_prefiller, self._connection_broke)
        self.intake = Intake(
            worker,
            self.receiver,
            self._post,
            settings,
            name=ref.id,
            on_ready=self._on_ready,
            on_failure=self._give_up,
            surrender=self.scheduler.pages.surrender,
            context=context,
        )
        self._loop = BatchLoop(
            worker,
            self.scheduler,
            metrics,
            admit=self._admit,
            on_drawn=self._on_drawn,
            on_broken=self._on_broken,
            on_refused=self._on_refused,
        )
        self._entrance = Entrance(
            worker,
            self.scheduler,
            ref.id,
            on_queued=self._loop.wake,
            on_complete=self._on_complete,
            on_refused=self._on_refused,
        )
        self._verifier = Verifier(worker, metrics, ref.id, on_equal=self._join, on_failure=self._give_up)
        self._census = Census(
            worker,
            self._requests,
            scheduler=self.scheduler,
            receiver=self.receiver,
            intake=self.intake,
            answers=self._answers,
            verifier=self._verifier,
        )

    # --- messages --------------------------------------------------------------------------------------------

    def _take(self, origin: Origin, message: Any) -> None:  # noqa: ANN401  # a member of FromRouter
        match message:
            case Assign():
                self._assign(origin, message)
            case Cancel():
                self._cancel(origin, message)
            case _:
                # PrefillReport and its kin come back on our own channels; at the inbox they are from nobody we asked.
                self._log.warning("unexpected at the inbox", type=type(message).__name__, sender=str(origin.sender))

    def _on_prefiller(self, origin: Origin, message: Any) -> None:  # noqa: ANN401  # a member of FromPrefiller
        match message:
            case PrefillReport():
                self._note(message)
                self.intake.on_report(origin, message)
            case CancelConfirmed():
                self.intake.on_confirmed(origin, message)
                self._answers.without_report(message.request_id)
            case PrefillFailed():
                self.intake.on_failed(origin, message)
                self._answers.without_report(message.request_id)
            case Refused():
                self.intake.on_refused(origin, message)
        self._loop.wake()

    def _connection_broke(self, prefiller: NodeRef) -> None:
        self.intake.connection_broke(prefiller)
        self._loop.wake()

    def _note(self, report: PrefillReport) -> None:
        if (request := self._requests.get(report.request_id)) is not None:
            request.note(report.timeline)
        self._answers.reported(report)

    def _take_event(self, event: Event) -> None:
        self.intake.on_event(event)

    def _assign(self, origin: Origin, message: Assign) -> None:
        request = self._entrance.request(message, origin)
        error = self._closed_to(request.id, request.id) or self._entrance.why_not(message)
        if error is not None:
            self._metrics.ended.labels("refused").inc()
            self._answers.failed(request, error)
            return
        self._enter(request.id, request, request.id)
        self._entrance.take(request, message)

    def _cancel(self, origin: Origin, message: Cancel) -> None:
        request = self._requests.get(message.request_id)
        if request is not None and request.origin.sender == origin.sender:
            arrived = request.state is State.RUNNING
            self._stop(request)
            self._answers.cancelled(request, arrived=arrived)

    # --- ways out --------------------------------------------------------------------------------------------

    def _stop(self, request: Request) -> None:
        """End a request that nobody wants any more."""
        self._end(request, State.CANCELLED, "cancelled")

    def _give_up(self, request: Request, error: RequestError) -> None:
        if request.machine.final:
            return
        why = {"code": error.code, "phase": error.phase, "why": error.message}
        self._log.warning("request failed", request_id=request.id, **why)
        self._end(request, State.FAILED, error.code)
        self._answers.failed(request, error)

    def _end(self, request: Request, state: State, how: str) -> None:
        if request.state is State.RECEIVING:
            self.intake.call_off(request)
        self.scheduler.end(request, state)
        del self._requests[request.id]
        self._metrics.ended.labels(how).inc()

    def _on_broken(self, request: Request, why: str) -> None:
        self._give_up(request, self._error(ErrorCode.INTERNAL, why, Phase.DECODE))

    def _on_refused(self, request: Request, why: str) -> None:
        text = f"the answer can't be held to its grammar: {why}"
        error = self._error(ErrorCode.BAD_REQUEST, text, Phase.ASSIGN)
        self._give_up(request, msgspec.structs.replace(error, param="grammar"))

    def _on_complete(self, request: Request) -> None:
        """What another decoder had answered is the whole answer."""
        self._answers.accepted(request)
        self._end(request, State.FINISHED, "finished")
        self._answers.finished(request, FinishReason.STOP)

    # --- into the batch, and out of it -----------------------------------------------------------------------

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
        if self._verify:
            self._verifier.begin(incoming)
        else:
            self._join(incoming)

    def _join(self, incoming: Incoming) -> None:
        self.scheduler.arrived(incoming.request)
        incoming.request.timeline.joined = now()
        self._loop.wake()

    def _on_drawn(self, drawn: list[DrawnRun]) -> None:
        for entry in drawn:
            if entry.finish is not None:
                self._end(entry.request, State.FINISHED, "finished")
        self._answers.step(drawn)
        self._drop_unreachable()

    # --- the cluster -----------------------------------------------------------------------------------------

    def _drop_unreachable(self) -> None:
        if gone := set(self._answers.unreachable()):
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

    def _sweep(self, alive: Callable[[NodeRef], bool]) -> None:
        self.intake.sweep(alive)
        self._answers.sweep(alive)
        for request in self._requests.values():
            if request.state in (State.COMPILING, State.WAITING):
                self._answers.queued(request)
        self._drop_unreachable()

    def stood_still(self, seconds: float) -> None:
        """This node was taken for lost meanwhile. What peers said may never come: nothing can be waited for."""
        text = f"decoder {self._ref.id} stood still for {seconds:.1f} s, long enough for its lease to end"
        for request in list(self._requests.values()):
            error = self._error(ErrorCode.NODE_LOST, text, Phase.DECODE)
            self._give_up(request, msgspec.structs.replace(error, avoid=False))

    def close(self) -> None:
        """Stop listening to the fabric and close the channels; memory keys go with the fabric."""
        self._verifier.close()
        self._entrance.close()
        self._loop.close()
        self._worker.fabric.detach()
        self._post.close()
