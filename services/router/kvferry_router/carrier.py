"""Carries a request through its attempts: another decoder goes on where one was lost."""

import itertools

from kvferry_node.logs import get_logger
from kvferry_node.placement import Placement
from kvferry_proto.errors import KvferryError
from kvferry_proto.nodes import NodeRef
from kvferry_proto.timeline import DecodeTimeline
from kvferry_proto.to_router import Cancelled, Finished

from kvferry_router.attempt import Attempt, End, Lost, StopFound
from kvferry_router.metrics import RouterMetrics
from kvferry_router.placing import Placing
from kvferry_router.request import Request
from kvferry_router.switchboard import Switchboard


class Carrier:
    """Tries until an answer is complete. Belongs to the event loop."""

    def __init__(
        self, placing: Placing, switchboard: Switchboard, metrics: RouterMetrics, *, max_attempts: int
    ) -> None:
        self._placing = placing
        self._switchboard = switchboard
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._log = get_logger()

    async def carry(self, request: Request) -> None:
        """Return when the answer is complete. Raises KvferryError: the error of the last attempt."""
        avoid: set[NodeRef] = set()
        cause: KvferryError | None = None
        for number in itertools.count(1):
            placement = await self._placing.place(request, avoid, cause)
            attempt = self._attempt(request, placement)
            end = await self._run(attempt, placement, number)
            if not isinstance(end, Lost):
                await self._finish(attempt, end)
                return
            if end.retry and completed_anyway(request):
                return
            cause = KvferryError(end.error)
            if not end.retry or number >= self._max_attempts:
                raise cause
            if end.blame:
                avoid.add(attempt.culprit(end.error))
            self._metrics.retries.labels(end.error.code).inc()
            lives = sorted(map(str, avoid))
            self._log.warning("trying again elsewhere", request_id=attempt.id, error=str(cause), avoid=lives)

    def _attempt(self, request: Request, placement: Placement) -> Attempt:
        return Attempt(
            placement.request_id,
            request,
            placement.decoder,
            placement.prefiller,
            on_spared=lambda: self._placing.release(placement, decoder=False),
        )

    async def _run(self, attempt: Attempt, placement: Placement, number: int) -> End:
        """Carry out one attempt; whatever ends it, its decoder is told if it may still hold something."""
        request = attempt.request
        request.assigned(attempt.id, number, attempt.nodes)
        try:
            self._switchboard.assign(attempt)
        except KvferryError as error:
            self._placing.release(placement)
            request.lost()
            return Lost(error=error.error, retry=True)
        try:
            end = await attempt.end
        finally:
            self._switchboard.close(attempt, held=attempt.held)
            # Else one that has come and gone between two beats of its nodes would count against them until the next.
            self._placing.release(placement)
        if isinstance(end, Lost):
            request.lost()
        return end

    async def _finish(self, attempt: Attempt, end: Finished | StopFound) -> None:
        self._placing.remember(attempt)
        word = end if isinstance(end, Finished) else await self._switchboard.last_word(attempt)
        _complete(attempt.request, end, word)


def completed_anyway(request: Request) -> bool:
    """Finish a request whose attempt was lost, or cut short, if the whole answer had come; return whether it had."""
    reason = request.answer.complete
    if reason is None:
        return False
    request.finish(reason, decoder=DecodeTimeline(), prefiller=None)
    return True


def _complete(request: Request, end: Finished | StopFound, word: Finished | Cancelled | None) -> None:
    """`word`: what the decoder says of an answer whose end it did not see, or did."""
    reason = end.finish_reason if isinstance(end, Finished) else request.answer.complete
    assert reason is not None
    cached = word.usage.cached_tokens if isinstance(word, Finished) else word.cached_tokens if word is not None else 0
    decoder, prefiller = (word.decoder, word.prefiller) if word is not None else (DecodeTimeline(), None)
    request.finish(reason, cached, decoder=decoder, prefiller=prefiller)
