"""A request's way from its assignment to the scheduler's queue: checked, and its grammar compiled, if it has one."""

from collections.abc import Callable
from pathlib import Path

from kvferry_engine.grammar import GrammarCompiler
from kvferry_engine.worker import Worker
from kvferry_node.channels import Origin
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.timeline import now
from kvferry_proto.to_decoder import Assign

from kvferry_decoder.assignment import why_not
from kvferry_decoder.grammar_desk import GrammarDesk
from kvferry_decoder.request import Request, State
from kvferry_decoder.scheduler import Scheduler


class Entrance:
    """Nothing is reserved for a request that is here. It leaves into the queue, or through a callback."""

    def __init__(
        self,
        worker: Worker,
        scheduler: Scheduler,
        name: str,
        *,
        on_queued: Callable[[], None],
        on_complete: Callable[[Request], None],
        on_refused: Callable[[Request, str], None],
    ) -> None:
        """`on_complete`: what another decoder had answered is the whole answer. `on_refused` says why the grammar
        can't be used."""
        self._worker = worker
        self._scheduler = scheduler
        self._name = name
        self._on_queued = on_queued
        self._on_complete = on_complete
        self._arrivals = 0
        compiler = GrammarCompiler(Path(worker.settings.model), worker.config.vocab_size)
        self._grammars = GrammarDesk(compiler, on_ready=self._compiled, on_refused=on_refused)

    def request(self, assign: Assign, origin: Origin) -> Request:
        """Make a request of an assignment."""
        request = Request.from_assign(assign, origin, self._arrivals)
        self._arrivals += 1
        request.timeline.assigned = now()
        return request

    def why_not(self, assign: Assign) -> RequestError | None:
        """Return why the assignment can't be taken, or None."""
        if assign.grammar is not None and self._grammars.full:
            text = "this decoder compiles as many grammars as it may"
            return RequestError(code=ErrorCode.OVERLOADED, message=text, phase=Phase.ASSIGN, node=self._name)
        return why_not(assign, self._worker, self._scheduler, self._name)

    def take(self, request: Request, assign: Assign) -> None:
        """Put a request into the queue, at once or when its grammar is compiled."""
        if assign.grammar is None:
            self._scheduler.add(request)
        else:
            self._grammars.begin(request, assign.grammar)

    def _compiled(self, request: Request) -> None:
        if request.drawing.complete:
            self._on_complete(request)
            return
        request.machine.move(State.WAITING)
        self._scheduler.add(request)
        self._on_queued()

    def close(self) -> None:
        """Forget what is being compiled."""
        self._grammars.close()
