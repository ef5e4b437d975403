"""--verify-kv: compares the pages that came with their source, before anything is computed from them."""

import asyncio
from collections.abc import Callable

from kvferry_engine.checksums import first_difference, written
from kvferry_engine.context_slots import state_checksum
from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_node.logs import get_logger
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s

from kvferry_decoder.intake import Incoming
from kvferry_decoder.ordering import lacking
from kvferry_decoder.request import Request, State


class Verifier:
    """Owns the checks under way. Says of each request how it went, unless the request has ended meanwhile."""

    def __init__(
        self,
        worker: Worker,
        metrics: WorkerMetrics,
        name: str,
        *,
        on_equal: Callable[[Incoming], None],
        on_failure: Callable[[Request, RequestError], None],
    ) -> None:
        self._worker = worker
        self._metrics = metrics
        self._name = name
        self._on_equal = on_equal
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, incoming: Incoming) -> None:
        """Check the pages of a receiving request, all of which have come."""
        task = asyncio.ensure_future(self._check(incoming))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    async def _check(self, incoming: Incoming) -> None:
        request, theirs = incoming.request, incoming.checksums or Int32s()
        pages = lacking(request, self._worker.layout)
        try:
            mine = await self._worker.checksums(pages, written(incoming.pieces))
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing else ends the request
            self._unreadable(request, error)
            return
        if request.state is not State.RECEIVING:
            return
        difference = first_difference(mine, theirs, len(pages), request.held) or _context_difference(incoming)
        self._metrics.verified.labels("equal" if difference is None else "different").inc(len(mine))
        if difference is None:
            self._on_equal(incoming)
        else:
            self._on_failure(request, self._error(incoming, difference))

    def _unreadable(self, request: Request, why: Exception) -> None:
        get_logger().exception("pages can't be verified", exc_info=why)
        if request.state is State.RECEIVING:
            text = f"the KV that came can't be verified: {why}"
            error = RequestError(code=ErrorCode.INTERNAL, message=text, phase=Phase.TRANSFER, node=self._name)
            self._on_failure(request, error)

    def _error(self, incoming: Incoming, difference: str) -> RequestError:
        text = f"KV from prefiller {incoming.transfer.peer.ref.id} is not what it sent: {difference}"
        return RequestError(code=ErrorCode.VERIFY_FAILED, message=text, phase=Phase.TRANSFER, node=self._name)


def _context_difference(incoming: Incoming) -> str | None:
    state = incoming.request.context
    if state is None or state_checksum(state) == incoming.context_checksum:
        return None
    return "the hidden state differs"
