"""The loop around the forward pass: plan chunks, register them with the fabric, compute."""

import asyncio
import functools
from collections.abc import Callable

from kvferry_engine.batch import SequenceSlice
from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_fabric import FabricError
from kvferry_node.logs import get_logger
from kvferry_proto.errors import ErrorCode
from kvferry_proto.timeline import Chunk as ChunkTime
from kvferry_proto.timeline import now

from kvferry_prefiller.request import Request, State
from kvferry_prefiller.scheduler import Chunk, Scheduler
from kvferry_prefiller.sender import Sender


class PassLoop:
    """Runs a pass whenever there is a chunk to compute, sleeps otherwise. A pass computes in the forward thread."""

    def __init__(
        self,
        worker: Worker,
        scheduler: Scheduler,
        sender: Sender,
        metrics: WorkerMetrics,
        *,
        on_broken: Callable[[Request, ErrorCode, str], None],
        on_computed: Callable[[Request], None],
    ) -> None:
        """`on_broken` says which request failed and why; `on_computed` that a pass has let go of a request."""
        self._worker = worker
        self._scheduler = scheduler
        self._sender = sender
        self._metrics = metrics
        self._on_broken = on_broken
        self._on_computed = on_computed
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Something has changed: there may be a pass to run."""
        self._work.set()

    async def run(self) -> None:
        """Prefill until cancelled."""
        while True:
            # Before the look around: what happens during it counts for the next.
            self._work.clear()
            self._admit()
            chunks = self._scheduler.plan_step(now())
            if not chunks:
                await self._work.wait()
                continue
            await self._pass(chunks)

    def _admit(self) -> None:
        for request in self._scheduler.admit(now()):
            self._try_to_send(request, functools.partial(self._sender.send_held, request))

    async def _pass(self, chunks: list[Chunk]) -> None:
        self._register(chunks)
        began = now()
        inputs = [_sequence(chunk) for chunk in chunks]
        slots = [chunk.request.context_slot for chunk in chunks if chunk.wants_context]
        failure = None
        try:
            await self._worker.compute(functools.partial(self._forward, inputs, slots))
        except Exception as error:  # noqa: BLE001  # whatever breaks a pass fails its requests, not the prefiller
            get_logger().exception("a forward pass failed", exc_info=error)
            failure = f"the forward pass failed: {error}"
        self._count(chunks, began)
        for chunk in chunks:
            if failure is not None:
                self._on_broken(chunk.request, ErrorCode.INTERNAL, failure)
            elif chunk.wants_context and chunk.request.state is State.RUNNING:
                self._try_to_send(chunk.request, functools.partial(self._sender.send_context, chunk.request))
        self._scheduler.finish_step(chunks)
        for chunk in chunks:
            self._on_computed(chunk.request)

    def _forward(self, inputs: list[SequenceSlice], slots: list[int | None]) -> None:
        """Compute a pass, in the forward thread, and keep the hidden states that are wanted, in `slots`."""
        if not slots:
            self._worker.forward(inputs, self._worker.on_layer)
            return
        hidden, contexts = self._worker.hidden_states(inputs, self._worker.on_layer), self._sender.contexts
        assert contexts is not None
        for slot, state in zip(slots, hidden, strict=True):
            assert slot is not None
            contexts.put(slot, state)

    def _register(self, chunks: list[Chunk]) -> None:
        """Register the chunk schedule with the fabric before the pass begins."""
        first_value = self._worker.counter.value + 1
        for chunk in chunks:
            self._try_to_send(chunk.request, functools.partial(self._sender.register, chunk, first_value))

    def _try_to_send(self, request: Request, send: Callable[[], None]) -> None:
        try:
            send()
        except FabricError as error:
            self._on_broken(request, ErrorCode.TRANSFER_FAILED, f"the pages to write were refused: {error}")

    def _count(self, chunks: list[Chunk], began: int) -> None:
        ended = now()
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe((ended - began) / 1e9)
        self._metrics.tokens.labels("prefilled").inc(sum(chunk.tokens for chunk in chunks))
        for chunk in chunks:
            chunk.request.timeline.add(ChunkTime(began, ended, chunk.tokens))


def _sequence(chunk: Chunk) -> SequenceSlice:
    prompt = chunk.request.order.tokens
    return SequenceSlice(
        tokens=prompt[chunk.start : chunk.end],
        start=chunk.start,
        pages=list(chunk.request.pages),
        want_logits=int(chunk.wants_context),
        following=prompt[chunk.end] if chunk.end < len(prompt) else None,
    )
