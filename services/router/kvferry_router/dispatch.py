"""The dispatcher: every request in flight, from its submission to the books."""

import asyncio
import functools
from collections.abc import Callable

from kvferry_node.logs import get_logger
from kvferry_node.placement import Placer
from kvferry_node.service import wait_until
from kvferry_proto.errors import ErrorCode, KvferryError, Phase, RequestError, fail
from kvferry_proto.nodes import NodeRecord, NodeRef

from kvferry_router import early_ends
from kvferry_router.answer import GrowingAnswer
from kvferry_router.carrier import Carrier, completed_anyway
from kvferry_router.handle import RequestHandle
from kvferry_router.job import Job
from kvferry_router.metrics import RouterMetrics
from kvferry_router.model_folder import ModelText
from kvferry_router.placing import Placing
from kvferry_router.request import Request
from kvferry_router.settings import RouterSettings
from kvferry_router.switchboard import OpenPost, Switchboard

RETRY_AFTER_SECONDS = 1.0
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
        self._metrics = metrics
        self._placing = Placing(
            ref=ref, settings=settings, placer=placer, decoders=decoders, alive=alive, metrics=metrics
        )
        self._switchboard = Switchboard(
            open_post,
            metrics,
            stop_token_ids=text.stop_token_ids,
            accept_seconds=settings.accept_seconds,
            cancel_seconds=settings.cancel_seconds,
        )
        self._carrier = Carrier(self._placing, self._switchboard, metrics, max_attempts=settings.max_attempts)
        self._requests: dict[Request, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._log = get_logger()
        self.draining = False

    def submit(self, job: Job, name: str = "") -> RequestHandle:
        """Take a request that its client knows by `name`.

        Raises KvferryError: DRAINING, or OVERLOADED when `max_inflight` are under way.
        """
        if self.draining:
            msg = "this router is shutting down"
            raise fail(ErrorCode.DRAINING, msg, Phase.ROUTE, self._ref.id, RETRY_AFTER_SECONDS)
        if len(self._requests) >= self._settings.max_inflight:
            msg = f"{len(self._requests)} requests are under way, as many as this router takes"
            raise fail(ErrorCode.OVERLOADED, msg, Phase.ROUTE, self._ref.id, RETRY_AFTER_SECONDS)
        request = Request(job, GrowingAnswer(job, self._text.tokenizer, self._text.stop_token_ids), name)
        task = asyncio.ensure_future(self._carry(request))
        # Not the end of _carry: a task that is cancelled before its first step runs nothing of it.
        task.add_done_callback(lambda _: self._book(request))
        self._requests[request] = task
        self._idle.clear()
        self._metrics.in_flight.set(len(self._requests))
        return RequestHandle(request, lambda: self._cancel(request))

    def on_join(self) -> None:
        """A node has come: the handler of the membership view."""
        self._placing.on_join()

    def on_leave(self, record: NodeRecord) -> None:
        """A node is gone: the handler of the membership view."""
        self._switchboard.on_leave(record)
        self._placing.on_leave(record)

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
            "waiting": self._placing.waiting,
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
        await self._placing.close()

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
                await self._carrier.carry(request)
        except TimeoutError:
            # The answer may be there, and only the decoder's last word about it still on its way.
            if completed_anyway(request):
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
        elif early_ends.to_be_told(request):
            self._switchboard.when_closed(request.id, functools.partial(early_ends.tell, request))
