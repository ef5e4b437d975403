"""The dispatcher: carries each request through its attempts until it is answered, failed or cancelled."""

import asyncio
import itertools
from collections.abc import Callable

from kvferry_node.logs import get_logger
from kvferry_node.placement import Placement, PlacementAsk, Placer
from kvferry_node.service import wait_until
from kvferry_proto.errors import ErrorCode, KvferryError, Phase, RequestError, fail
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRecord, NodeRef
from kvferry_proto.timeline import DecodeTimeline
from kvferry_proto.to_router import Cancelled, Finished

from kvferry_router.admission import Admission
from kvferry_router.answer import GrowingAnswer
from kvferry_router.attempt import Attempt, End, Lost, StopFound
from kvferry_router.handle import RequestHandle
from kvferry_router.job import Job
from kvferry_router.metrics import RouterMetrics
from kvferry_router.model_folder import ModelText
from kvferry_router.prefix_memory import PrefixMemory
from kvferry_router.request import Request
from kvferry_router.settings import RouterSettings
from kvferry_router.switchboard import OpenPost, Switchboard

RETRY_AFTER_SECONDS = 1.0
COMES_BACK = frozenset({ErrorCode.NODE_LOST, ErrorCode.DRAINING, ErrorCode.STALE_INCARNATION})
"""Errors that say that a node is gone."""
# After the last request has gone, confirmations of cancels may still be on their way.
CLOSING_SECONDS = 2.0


class Dispatcher:
    """Owns every request in flight. Belongs to the event loop."""

    def __init__(
        self,
        *,
        ref: NodeRef,
        settings: RouterSettings,
        text: ModelText,
        placer: Placer,
        decoders: Callable[[], list[NodeRecord]],
        alive: Callable[[NodeRef], bool],
        open_post: OpenPost,
        metrics: RouterMetrics,
    ) -> None:
        """`alive`: whether this life of a node is in the cluster, as far as this router has heard."""
        self._ref = ref
        self._settings = settings
        self._text = text
        self._decoders = decoders
        self._alive = alive
        self._metrics = metrics
        self._admission = Admission(
            placer, metrics, line_length=settings.admission_queue, line_seconds=settings.admission_seconds
        )
        self._switchboard = Switchboard(
            open_post,
            metrics,
            stop_token_ids=text.stop_token_ids,
            accept_seconds=settings.accept_seconds,
            cancel_seconds=settings.cancel_seconds,
        )
        self._page = 1
        self._memory = PrefixMemory(settings.prefix_blocks)
        self._requests: dict[Request, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._log = get_logger()
        self.draining = False

    def submit(self, job: Job) -> RequestHandle:
        """Take a request. Raises KvferryError: DRAINING, or OVERLOADED when `max_inflight` are under way."""
        if self.draining:
            msg = "this router is shutting down"
            raise fail(ErrorCode.DRAINING, msg, Phase.ROUTE, self._ref.id, RETRY_AFTER_SECONDS)
        if len(self._requests) >= self._settings.max_inflight:
            msg = f"{len(self._requests)} requests are under way, as many as this router takes"
            raise fail(ErrorCode.OVERLOADED, msg, Phase.ROUTE, self._ref.id, RETRY_AFTER_SECONDS)
        request = Request(job, GrowingAnswer(job, self._text.tokenizer, self._text.stop_token_ids))
        task = asyncio.ensure_future(self._carry(request))
        # Not the end of _carry: a task that is cancelled before its first step runs nothing of it.
        task.add_done_callback(lambda _: self._book(request))
        self._requests[request] = task
        self._idle.clear()
        self._metrics.in_flight.set(len(self._requests))
        return RequestHandle(request, lambda: self._cancel(request))

    def on_join(self) -> None:
        """A node has come: the handler of the membership view."""
        self._admission.on_join()

    def on_leave(self, record: NodeRecord) -> None:
        """A node is gone: the handler of the membership view."""
        self._switchboard.on_leave(record)
        self._memory.forget(record.ref)

    def stood_still(self, seconds: float) -> None:
        """This router was taken for lost meanwhile."""
        self._switchboard.stood_still(seconds)

    @property
    def decoder_channels(self) -> int:
        """Open channels to decoders."""
        return len(self._switchboard.post)

    def held(self) -> dict[str, int]:
        """Everything that must be zero when idle."""
        return {
            "requests": len(self._requests),
            "waiting": self._admission.waiting,
            "attempts": self._switchboard.open,
            "closing": self._switchboard.closing,
        }

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what runs end, and after `seconds` end it with DRAINING."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self._log.warning("requests are cut off by the shutdown", requests=len(self._requests))
        error = RequestError(
            code=ErrorCode.DRAINING, message="this router has shut down", phase=Phase.ROUTE, node=self._ref.id
        )
        for request in list(self._requests):
            self._end(request, error)
        await asyncio.gather(*self._requests.values(), return_exceptions=True)
        await wait_until(lambda: not self._switchboard.closing, CLOSING_SECONDS)
        self._switchboard.abandon()
        await self._admission.close()

    def close(self) -> None:
        """Close the channels to decoders; after `drain`."""
        self._switchboard.post.close()

    def _cancel(self, request: Request) -> None:
        message = "the client has gone, or has cancelled"
        self._end(request, RequestError(code=ErrorCode.CANCELLED, message=message, phase=request.phase))

    def _end(self, request: Request, error: RequestError) -> None:
        """End a request from outside: its carrier cleans up."""
        if not request.over:
            request.fail(error)
            self._requests[request].cancel()

    # --- carrying -------------------------------------------------------------------------------------------

    async def _carry(self, request: Request) -> None:
        try:
            async with asyncio.timeout(self._settings.request_seconds):
                await self._attempts(request)
        except TimeoutError:
            # The answer may be there, and only the decoder's last word about it still on its way.
            if self._completed_anyway(request):
                return
            text = f"the request took longer than {self._settings.request_seconds:g} s"
            node = self._ref.id
            request.fail(RequestError(code=ErrorCode.TIMEOUT, message=text, phase=request.phase, node=node))
        except KvferryError as error:
            request.fail(error.error)
        except asyncio.CancelledError:
            if not request.over:
                raise
        except Exception as error:  # noqa: BLE001  # a bug must end one request, with an answer, not the router
            self._log.exception("a request failed by a bug", request_id=request.id)
            text = f"{type(error).__name__} in the router"
            request.fail(RequestError(code=ErrorCode.INTERNAL, message=text, phase=request.phase, node=self._ref.id))

    def _book(self, request: Request) -> None:
        del self._requests[request]
        self._metrics.in_flight.set(len(self._requests))
        if not self._requests:
            self._idle.set()
        if request.outcome is not None:
            self._metrics.finished(request.outcome.timeline)
            self._metrics.prompt_tokens.inc(len(request.job.tokens))

    async def _attempts(self, request: Request) -> None:
        """Try until the answer is complete. Raises KvferryError: the error of the last attempt."""
        avoid: set[NodeRef] = set()
        cause: KvferryError | None = None
        for number in itertools.count(1):
            placement = await self._place(request, avoid, cause)
            attempt = self._attempt(request, placement)
            end = await self._run(attempt, placement, number)
            if not isinstance(end, Lost):
                self._remember(attempt)
                word = end if isinstance(end, Finished) else await self._switchboard.last_word(attempt)
                _complete(request, end, word)
                return
            if end.retry and self._completed_anyway(request):
                return
            cause = KvferryError(end.error)
            if not end.retry or number >= self._settings.max_attempts:
                raise cause
            if end.blame:
                avoid.add(attempt.culprit(end.error))
            self._metrics.retries.labels(end.error.code).inc()
            lives = sorted(map(str, avoid))
            self._log.warning("trying again elsewhere", request_id=attempt.id, error=str(cause), avoid=lives)

    async def _place(self, request: Request, avoid: set[NodeRef], cause: KvferryError | None) -> Placement:
        """Reserve. With nobody left to try, what brought us here is the better answer than that nobody is left.

        A node that is gone may be started again, or another for it; one that failed the request won't be.
        """
        gone = cause is not None and cause.error.code in COMES_BACK
        seconds = self._settings.recovery_seconds if gone else 0.0
        try:
            return await self._admission.place(lambda: self._ask(request, avoid), seconds)
        except KvferryError as error:
            if cause is not None and error.error.code is ErrorCode.NO_NODES:
                raise cause from error
            raise

    def _ask(self, request: Request, avoid: set[NodeRef]) -> PlacementAsk:
        tokens = len(request.job.tokens) + len(request.answer.token_ids)
        room = request.answer.room
        return PlacementAsk(
            request_id=self._next_id(),
            tokens=tokens,
            pages=-(-(tokens + min(room, self._settings.reserve_answer_tokens)) // self._page_size()),
            model=self._settings.model_name,
            context=tokens + room,
            exclude=frozenset(avoid),
            local_prefill=self._settings.local_prefill,
            held=self._held(request),
            affinity=self._settings.prefix_affinity,
        )

    def _layouts(self) -> list[KVLayout]:
        return [record.layout for record in self._decoders() if record.layout is not None]

    def _page_size(self) -> int:
        """The smallest page in the cluster, or the last known: so no decoder is asked for too few, or too many."""
        self._page = min((layout.page_size for layout in self._layouts()), default=self._page)
        return self._page

    def _held(self, request: Request) -> dict[str, int]:
        """Who has how many of the tokens. Where decoders differ in their layouts, those that are like the first."""
        layouts = self._layouts()
        if not layouts or not self._settings.prefix_affinity:
            return {}
        tokens = [*request.job.tokens, *request.answer.token_ids]
        return self._memory.held(layouts[0], tokens[:-1], request.job.cache_salt)

    def _remember(self, attempt: Attempt) -> None:
        """Prompt and answer but for its last token are in the decoder's pages, the prompt in the prefiller's.

        Of a node that has left while the answer grew nothing is left, and nobody would forget it again.
        """
        job, layout = attempt.request.job, attempt.decoder.layout
        if layout is None or not self._settings.prefix_affinity:
            return
        tokens = [*job.tokens, *attempt.request.answer.token_ids]
        if self._alive(attempt.decoder.ref):
            self._memory.note(attempt.decoder.ref, layout, tokens[:-1], job.cache_salt)
        if attempt.prefiller is not None and self._alive(attempt.prefiller.ref):
            self._memory.note(attempt.prefiller.ref, layout, job.tokens[:-1], job.cache_salt)

    def _next_id(self) -> str:
        return f"{self._ref.id}-{self._ref.incarnation:x}-{next(self._numbers)}"

    def _attempt(self, request: Request, placement: Placement) -> Attempt:
        return Attempt(
            placement.request_id,
            request,
            placement.decoder,
            placement.prefiller,
            on_spared=lambda: self._admission.release(placement, decoder=False),
        )

    async def _run(self, attempt: Attempt, placement: Placement, number: int) -> End:
        """Carry out one attempt; whatever ends it, its decoder is told if it may still hold something."""
        request = attempt.request
        request.assigned(attempt.id, number)
        try:
            self._switchboard.assign(attempt)
        except KvferryError as error:
            self._admission.release(placement)
            request.lost()
            return Lost(error=error.error, retry=True)
        try:
            end = await attempt.end
        finally:
            self._switchboard.close(attempt, held=attempt.held)
            # Else one that has come and gone between two beats of its nodes would count against them until the next.
            self._admission.release(placement)
        if isinstance(end, Lost):
            request.lost()
        return end

    def _completed_anyway(self, request: Request) -> bool:
        """Whether an attempt that was lost, or cut short, had already streamed the whole answer."""
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
