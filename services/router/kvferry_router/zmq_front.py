"""The ZeroMQ front: Generate and CancelGenerate come in, Delta, Completed and Failed go out."""

import asyncio
from collections.abc import Iterable

from kvferry_node.channels import Origin
from kvferry_node.errors import ChannelError, QueueFull
from kvferry_node.logs import get_logger
from kvferry_proto.codec import WireError
from kvferry_proto.errors import HTTP_STATUS, ErrorCode, KvferryError
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Message, Refused
from kvferry_proto.timeline import now
from kvferry_proto.to_client import Completed, Failed
from kvferry_proto.to_router import CancelGenerate, Generate

from kvferry_router.bad_request import BadRequest
from kvferry_router.deltas import deltas
from kvferry_router.dispatch import Dispatcher
from kvferry_router.handle import RequestHandle
from kvferry_router.job import Job, Outcome, TokenEvent
from kvferry_router.jobs import JobMaker
from kvferry_router.metrics import RouterMetrics

STALL_POLL_SECONDS = 0.02


class _Session:
    """One request of one client."""

    def __init__(self, origin: Origin, client_id: str) -> None:
        self.origin = origin
        self.id = client_id
        self.handle: RequestHandle | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.handle is not None:
            self.handle.cancel()


class ZmqFront:
    """Serves the clients of the router's inbox. Clients name their requests; names hold per connection."""

    def __init__(
        self, dispatcher: Dispatcher, jobs: JobMaker, metrics: RouterMetrics, model: str, *, stall_seconds: float
    ) -> None:
        self._dispatcher = dispatcher
        self._jobs = jobs
        self._metrics = metrics
        self._model = model
        self._stall_seconds = stall_seconds
        self._sessions: dict[tuple[bytes, str], _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger()

    def on_message(self, origin: Origin, message: Message) -> None:
        """Take a client's message: the handler of the router's inbox."""
        match message:
            case Generate():
                self._begin(origin, message)
            case CancelGenerate():
                session = self._sessions.get((origin.key, message.id))
                if session is not None:
                    session.cancel()
            case Refused():
                self._log.warning("refused by a client", reason=message.reason, detail=message.detail)

    def held(self) -> dict[str, int]:
        """Everything that must be zero when idle."""
        return {
            "client_requests": len(self._sessions),
            "client_channels": len({key for key, _ in self._sessions}),
        }

    async def close(self) -> None:
        """Wait until what has ended is also told to the clients; the dispatcher has drained before."""
        await asyncio.gather(*self._tasks)

    def _begin(self, origin: Origin, message: Generate) -> None:
        key = (origin.key, message.id)
        if key in self._sessions:
            # Failed would end the request that has this name, as far as its client can tell.
            detail = f"a request named {message.id!r} is open on this connection"
            origin.reply(Refused(reason="unexpected", detail=detail, about=message.id))
            return
        session = self._sessions[key] = _Session(origin, message.id)
        task = asyncio.ensure_future(self._serve(session, message, now()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, session: _Session, message: Generate, received: int) -> None:
        try:
            status = await self._answer(session, message, received)
        except (ChannelError, WireError) as error:
            status = HTTP_STATUS[ErrorCode.CANCELLED]
            self._log.info("a client can't be answered", client=str(session.origin.sender), error=str(error))
        finally:
            session.cancel()
            del self._sessions[session.origin.key, session.id]
        self._metrics.requests.labels("zmq", str(status)).inc()

    async def _answer(self, session: _Session, message: Generate, received: int) -> int:
        """Answer, and return the status for the books. Raises ChannelError if the client is gone or reads nothing."""
        try:
            session.handle = self._dispatcher.submit(await self._job(message, received), session.id)
            if session.cancelled:
                session.handle.cancel()
            async for item in session.handle:
                for reply in self._replies(session, item):
                    await self._send(session, reply)
        except KvferryError as failure:
            await self._send(session, Failed(id=session.id, error=failure.error))
            return failure.error.status
        return 200

    def _replies(self, session: _Session, item: TokenEvent | Outcome) -> Iterable[Message]:
        if isinstance(item, TokenEvent):
            return deltas(session.id, item)
        completed = Completed(
            id=session.id,
            finish_reason=item.finish_reason,
            usage=item.usage,
            timeline=item.timeline,
            model=self._model,
        )
        return [completed]

    async def _send(self, session: _Session, message: Message) -> None:
        """Send; while the client's queue is full, wait: what comes meanwhile is joined."""
        deadline = asyncio.get_running_loop().time() + self._stall_seconds
        while True:
            try:
                session.origin.reply(message)
                return
            except QueueFull:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(STALL_POLL_SECONDS)

    async def _job(self, message: Generate, received: int) -> Job:
        self._jobs.check_model(message.model)
        return self._jobs.make(
            await self._tokens(message),
            message.sampling,
            message.stop,
            received,
            cache_salt=message.cache_salt,
            grammar=message.grammar,
            prompt_field="prompt" if message.messages is None else "messages",
        )

    async def _tokens(self, message: Generate) -> Int32s:
        given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(message, name) is not None]
        if len(given) != 1:
            msg = f"exactly one of prompt, messages, prompt_ids must be given, got {', '.join(given) or 'none'}"
            raise BadRequest(msg, "prompt")
        if message.prompt is not None:
            return await self._jobs.text_tokens(message.prompt)
        if message.messages is not None:
            return await self._jobs.chat_tokens(message.messages)
        return self._jobs.check_ids(message.prompt_ids or [])
