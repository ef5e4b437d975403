"""The prefiller: takes prompts from decoders, computes them in chunks, and writes their KV into the decoders' pages.

Never samples. A request is over for it when its own writes are complete; the decoder is not told, it counts.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from kvferry_engine.checksums import sent
from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_engine.worker_service import WorkerService
from kvferry_fabric import Event, EventKind, FabricError
from kvferry_node.channels import Origin
from kvferry_node.membership import VIEW_LAG_NS
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.nodes import NodeRef, Role
from kvferry_proto.shards import plan
from kvferry_proto.timeline import now
from kvferry_proto.to_prefiller import CancelPrefill, Prefill

from kvferry_prefiller import answers
from kvferry_prefiller.admission import why_not
from kvferry_prefiller.census import Census
from kvferry_prefiller.contexts import Contexts
from kvferry_prefiller.pass_loop import PassLoop
from kvferry_prefiller.request import Key, Request, State, key_of
from kvferry_prefiller.scheduler import Scheduler
from kvferry_prefiller.sender import Sender
from kvferry_prefiller.settings import PrefillerSettings


class PrefillerService(WorkerService[Key, Request]):
    """Joins scheduler and sender. All bookkeeping runs in the event loop's thread."""

    role, entry, work = Role.PREFILLER, Phase.PREFILL, Phase.PREFILL

    def __init__(self, worker: Worker, settings: PrefillerSettings, ref: NodeRef, metrics: WorkerMetrics) -> None:
        super().__init__(worker, ref, metrics)
        self.scheduler = Scheduler(
            worker.allocator,
            worker.layout,
            chunk_size=settings.chunk_size,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            age_limit_ns=int(settings.overtake_seconds * 1e9),
        )
        self._sender = Sender(worker, self._open_contexts(settings.max_running) if worker.model.drafts else None)
        self._loop = PassLoop(
            worker,
            self.scheduler,
            self._sender,
            metrics,
            on_broken=self._on_broken,
            on_computed=self._release_if_over,
        )
        self._reports: set[asyncio.Task[None]] = set()
        self._census = Census(worker, self._requests, self._reports, scheduler=self.scheduler, sender=self._sender)

    def _open_contexts(self, count: int) -> Contexts:
        return Contexts(self._worker.fabric, self._worker.new_context_slots(count), count)

    # --- messages --------------------------------------------------------------------------------------------

    def _take(self, origin: Origin, message: Any) -> None:  # noqa: ANN401  # a member of ToPrefiller
        match message:
            case Prefill():
                self._prefill(origin, message)
            case CancelPrefill():
                self._cancel(origin, message)

    def _prefill(self, origin: Origin, order: Prefill) -> None:
        error = self._why_not(origin, order)
        if error is not None:
            self._metrics.ended.labels("refused").inc()
            answers.failed(origin, order, error)
            return
        request = Request(order, origin, plan(self._worker.layout, order.layout, turn=order.slot))
        request.timeline.received = now()
        try:
            self._sender.connect(request)
        except FabricError as failure:
            self._sender.disconnect(request)
            text = f"the decoder's memory can't be reached: {failure}"
            answers.failed(origin, order, self._error(ErrorCode.TRANSFER_FAILED, text, Phase.TRANSFER))
            return
        self._enter(request.key, request, order.request_id)
        self.scheduler.add(request)

    def _why_not(self, origin: Origin, order: Prefill) -> RequestError | None:
        closed = self._closed_to(key_of(origin, order.request_id), order.request_id)
        return closed or why_not(order, self._worker, self.scheduler, ref=self._ref, decoder=origin.sender)

    def _cancel(self, origin: Origin, message: CancelPrefill) -> None:
        """Confirm now if nothing of the request is here, else when nothing of it is in flight."""
        request = self._requests.get(key_of(origin, message.request_id))
        if request is None:
            answers.confirmed(origin, message)
        elif request.state is not State.STOPPING:
            self._stop(request, None)

    # --- ways out --------------------------------------------------------------------------------------------

    def _stop(self, request: Request, failure: RequestError | None) -> None:
        """Compute and post no more; told to the decoder when nothing is in flight."""
        if request.state is State.STOPPING:
            return
        request.failure = failure
        self.scheduler.stop(request)
        self._sender.cancel(request)
        self._release_if_over(request)

    def _take_event(self, event: Event) -> None:
        request = self._sender.ended(event.transfer)
        if request is None:
            return
        self._metrics.transfers.labels(event.kind.name.lower()).inc()
        timeline = request.timeline
        timeline.pages += event.pages
        timeline.bytes += event.bytes
        timeline.writes += event.writes
        timeline.last_layer = max(timeline.last_layer, event.last_counter_ns)
        timeline.last_write = max(timeline.last_write, event.last_completion_ns)
        if event.kind is EventKind.FAILED:
            text = f"writing KV to decoder {request.origin.sender.id} failed: {event.text}"
            self._stop(request, self._error(ErrorCode.TRANSFER_FAILED, text, Phase.TRANSFER))
        self._release_if_over(request)

    def _release_if_over(self, request: Request) -> None:
        if not self.scheduler.can_release(request) or request.key not in self._requests:
            return
        if request.state is State.DRAINING and request.order.checksums:
            self._checksum_then_release(request)
            return
        self._release(request, Int32s(), None)

    def _checksum_then_release(self, request: Request) -> None:
        # Out of the books now, so that it is released once; its pages stay held until the checksums are taken.
        del self._requests[request.key]
        task = asyncio.ensure_future(self._checksum(request))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _checksum(self, request: Request) -> None:
        pages, contexts = request.pages[request.order.first_page :], self._sender.contexts
        checksums = Int32s()
        try:
            checksums = await self._worker.checksums(pages, sent(request.pieces))
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing else ends the request
            self._log.exception("checksums can't be taken", exc_info=error)
            request.failure = self._error(ErrorCode.INTERNAL, f"checksums can't be taken: {error}", Phase.TRANSFER)
            self.scheduler.stop(request)
        self._release(request, checksums, None if contexts is None else contexts.checksum(request))

    def _release(self, request: Request, checksums: Int32s, context_checksum: int | None) -> None:
        stopped = request.state is State.STOPPING
        self.scheduler.release(request)
        self._sender.disconnect(request)
        self._requests.pop(request.key, None)
        how = "done" if not stopped else "cancelled" if request.failure is None else request.failure.code
        self._metrics.ended.labels(how).inc()
        if stopped:
            answers.stopped(request)
        else:
            answers.reported(request, checksums, context_checksum, node=self._ref.id)
        self._loop.wake()

    def _on_broken(self, request: Request, code: ErrorCode, why: str) -> None:
        phase = Phase.TRANSFER if code is ErrorCode.TRANSFER_FAILED else Phase.PREFILL
        self._stop(request, self._error(code, why, phase))

    # --- the cluster -----------------------------------------------------------------------------------------

    def node_left(self, ref: NodeRef) -> None:
        """A decoder's lease has ended, or it has restarted: nobody wants its pages."""
        for request in [each for each in self._requests.values() if each.origin.sender == ref]:
            if request.state is State.STOPPING:
                continue
            self._log.info("decoder gone: cancelling", request_id=request.order.request_id, decoder=str(ref))
            self._stop(request, None)
        self._sender.forget(ref)
        self._loop.wake()

    def _sweep(self, alive: Callable[[NodeRef], bool]) -> None:
        """Look for decoders that left without anyone noticing."""
        known_by = now() - VIEW_LAG_NS
        requests = self._requests.values()
        for ref in {each.origin.sender for each in requests if each.timeline.received < known_by}:
            if not alive(ref):
                self.node_left(ref)
        for ref in self._sender.known - {each.origin.sender for each in requests}:
            if not alive(ref):
                self._sender.forget(ref)

    def stood_still(self, _seconds: float) -> None:
        """This node was taken for lost meanwhile: decoders have turned elsewhere."""
        for request in list(self._requests.values()):
            self._stop(request, None)
        self._loop.wake()

    def _give_up(self, request: Request, error: RequestError) -> None:
        self._stop(request, error)

    def close(self) -> None:
        """Stop listening to the fabric."""
        for task in self._reports:
            task.cancel()
        self._worker.fabric.detach()
