"""What prefiller and decoder have in common: the book of their requests, and what their node asks of them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvferry_fabric import Event
from kvferry_node.channels import Origin
from kvferry_node.logs import get_logger
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.nodes import Load, NodeRef, Role

from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

SWEEP_SECONDS = 0.25


class StepLoop(Protocol):
    """What computes whenever there is something to compute."""

    def wake(self) -> None:
        """Something has changed."""

    async def run(self) -> None:
        """Compute until cancelled."""


class Census(Protocol):
    """What a service says of itself."""

    def load(self) -> Load:
        """What placement weighs."""

    def states(self) -> dict[str, int]:
        """Requests by state, for metrics."""

    def held(self) -> dict[str, int]:
        """What must be zero when idle, beyond what every worker holds."""

    def under_way(self) -> bool:
        """Whether something is still to end, which will give back what it holds."""


class WorkerService(ABC, Generic[K, R]):
    """Requests of type R under keys of type K. All in the event loop's thread."""

    role: ClassVar[Role]
    entry: ClassVar[Phase]
    """Phase that a request is refused in."""
    work: ClassVar[Phase]
    """Phase that a request is in while it is here."""

    _loop: StepLoop
    _census: Census

    def __init__(self, worker: Worker, ref: NodeRef, metrics: WorkerMetrics) -> None:
        self._worker = worker
        self._ref = ref
        self._metrics = metrics
        self._log = get_logger()
        self._requests: dict[K, R] = {}
        self._admitted: list[str] = []
        self.draining = False

    def listen(self) -> None:
        """Hear the fabric's events in the running loop."""
        self._worker.fabric.attach(asyncio.get_running_loop(), self._on_event)

    async def run(self) -> None:
        """Compute until cancelled."""
        await self._loop.run()

    def on_message(self, origin: Origin, message: Any) -> None:  # noqa: ANN401  # a member of the inbox's kind
        """Handle a message at the inbox."""
        self._take(origin, message)
        self._loop.wake()

    def _on_event(self, event: Event) -> None:
        self._take_event(event)
        self._loop.wake()

    async def housekeeping(self, alive: Callable[[NodeRef], bool]) -> None:
        """Look after deadlines and lost peers until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._sweep(alive)
            self._loop.wake()

    # --- its requests ----------------------------------------------------------------------------------------

    def _enter(self, key: K, request: R, request_id: str) -> None:
        self._requests[key] = request
        self._admitted.append(request_id)

    def _closed_to(self, key: K, request_id: str) -> RequestError | None:
        """Why no request enters under this key, whatever it is; None if one may."""
        if key in self._requests:
            return self._error(ErrorCode.BAD_REQUEST, f"request id {request_id} is in use here", self.entry)
        if self.draining:
            return self._error(ErrorCode.DRAINING, f"this {self.role} is shutting down", self.entry)
        return None

    def _error(self, code: ErrorCode, text: str, phase: Phase) -> RequestError:
        return RequestError(code=code, message=text, phase=phase, node=self._ref.id)

    def fail_rest(self, code: ErrorCode, why: str) -> None:
        """Give up what has not ended: the time to drain is over, or a rank is lost. It goes on elsewhere."""
        for request in list(self._requests.values()):
            self._give_up(request, self._error(code, f"this {self.role} was shut down: {why}", self.work))

    def admitted(self) -> list[str]:
        """Requests taken since the last call: they are part of `load` now."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def held(self) -> dict[str, int]:
        """Everything that must be zero when idle."""
        book, stats = self._worker.allocator, self._worker.fabric.stats()
        return {
            "requests": len(self._requests),
            "held_pages": book.held_pages,
            "quarantined_pages": book.quarantined_pages,
            "active_transfers": stats.active_transfers,
            "in_flight_writes": stats.in_flight_writes,
            **self._census.held(),
        }

    def load(self) -> Load:
        """What placement weighs."""
        return self._census.load()

    def states(self) -> dict[str, int]:
        """Requests by state, for metrics."""
        return self._census.states()

    def under_way(self) -> bool:
        """Whether something is still to end, which will give back what it holds."""
        return self._census.under_way()

    # --- what each does in its own way -----------------------------------------------------------------------

    @abstractmethod
    def _take(self, origin: Origin, message: Any) -> None:  # noqa: ANN401  # a member of the inbox's kind
        """Handle a message at the inbox; the loop is woken after it."""

    @abstractmethod
    def _take_event(self, event: Event) -> None:
        """Handle an event of the fabric; the loop is woken after it."""

    @abstractmethod
    def _sweep(self, alive: Callable[[NodeRef], bool]) -> None:
        """Look once after deadlines, and peers that left without anyone noticing."""

    @abstractmethod
    def _give_up(self, request: R, error: RequestError) -> None:
        """End a request by this error."""

    @abstractmethod
    def node_left(self, ref: NodeRef) -> None:
        """A node's lease has ended, or it has restarted."""

    @abstractmethod
    def stood_still(self, seconds: float) -> None:
        """This node was taken for lost meanwhile: whatever it had is done elsewhere."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the worker."""
