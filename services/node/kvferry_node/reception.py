"""What happens to a multipart that came in: decoded and handled, or counted, logged and refused. Never raises."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import orjson
from kvferry_proto.codec import Envelope, WireError, decode
from kvferry_proto.errors import KvferryError
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef, Peer

from kvferry_node.errors import ChannelError
from kvferry_node.logs import Throttle, get_logger
from kvferry_node.metrics import NodeMetrics

_MAX_DETAIL = 500
"""Characters of a refusal's text, sent or logged."""


class Origin(Protocol):
    """Where a message came from, and the way back."""

    @property
    def sender(self) -> NodeRef:
        """Who says that it sent the message."""

    @property
    def peer(self) -> Peer | None:
        """The peer at the other end of a channel that this node opened; None for what came in at the inbox."""

    @property
    def key(self) -> bytes:
        """The connection that it came over; messages with the same key come from the same socket, in order."""

    def reply(self, message: msgspec.Struct) -> None:
        """Answer over the socket that it came over.

        Raises PeerGone, QueueFull, or WireError for a message too large to be taken.
        """


Handler = Callable[[Origin, Any], Awaitable[None] | None]
"""Takes a message. Called in the loop: it must not block. What an async handler awaits runs beside later messages."""


class Reception:
    """Reads the messages of one kind for one node."""

    def __init__(self, ref: NodeRef, kind: Any, handler: Handler, metrics: NodeMetrics) -> None:  # noqa: ANN401
        self.ref = ref
        self.metrics = metrics
        self._kind = kind | Refused
        self._takes_refused = Refused in getattr(kind, "__args__", (kind,))
        self._handler = handler
        self._throttle = Throttle()
        self._log = get_logger()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, parts: list[bytes], origin: Callable[[NodeRef], Origin], expected: NodeRef | None = None) -> None:
        """Handle the multipart `parts`; `origin` makes the way back from the sender's name.

        `expected`: the only sender that is listened to, on a channel to one peer.
        """
        try:
            envelope = decode(parts, self._kind)
        except WireError as error:
            # The sender's own name can't be trusted, and isn't needed: the answer goes to the socket.
            self._refuse(origin(NodeRef("unknown", 0)), error.reason, error.detail, answer=not _is_refusal(parts))
            return
        way = origin(envelope.sender)
        body = envelope.body
        self.metrics.messages.labels(type(body).__name__, "in").inc()
        stale = self._why_stale(envelope, expected)
        if stale is not None:
            self._refuse(way, "stale", stale, about=_about(body))
        elif isinstance(body, Refused) and not self._takes_refused:
            self._warn("refused", by=str(way.sender), reason=_shortened(body.reason), detail=_shortened(body.detail))
        else:
            self._handle(way, body)

    def close(self) -> None:
        """Cancel the async handlers that still run."""
        for task in self._tasks:
            task.cancel()

    def _why_stale(self, envelope: Envelope[Any], expected: NodeRef | None) -> str | None:
        # A refusal is heard whoever is meant: it tells that the peer has another incarnation by now.
        if isinstance(envelope.body, Refused):
            return None
        if envelope.to not in (0, self.ref.incarnation):
            return f"meant for incarnation {envelope.to:x}; this is {self.ref}, started since"
        if expected is not None and envelope.sender != expected:
            return f"comes from {envelope.sender}, expected on this channel is {expected}"
        return None

    def _handle(self, way: Origin, body: msgspec.Struct) -> None:
        try:
            result = self._handler(way, body)
        except Exception as error:  # noqa: BLE001  # whatever a handler raises ends one message, not the socket
            self._failed(way, body, error)
            return
        if result is not None:
            task = asyncio.ensure_future(self._wait(way, body, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wait(self, way: Origin, body: msgspec.Struct, result: Awaitable[None]) -> None:
        try:
            await result
        except Exception as error:  # noqa: BLE001  # as above
            self._failed(way, body, error)

    def _failed(self, way: Origin, body: msgspec.Struct, error: Exception) -> None:
        name = type(body).__name__
        self.metrics.handler_errors.labels(name).inc()
        if (held := self._throttle.passes(f"handler {name}")) is not None:
            self._log.error("handler failed", type=name, sender=str(way.sender), held_back=held, exc_info=error)
        if not isinstance(body, Refused):
            reason = error.error.code if isinstance(error, KvferryError) else "internal"
            self._answer(way, Refused(reason=reason, detail=_shortened(f"{name}: {error}"), about=_about(body)))

    def _refuse(self, way: Origin, reason: str, detail: str, *, about: str = "", answer: bool = True) -> None:
        # What can't be read is quoted in the reason why: a megabyte of it must fill neither the log nor the answer.
        detail = _shortened(detail)
        self.metrics.wire_refused.labels(reason).inc()
        self._warn("refused a message", reason=reason, detail=detail, sender=str(way.sender))
        if answer:
            self._answer(way, Refused(reason=reason, detail=detail, about=about))

    def _answer(self, way: Origin, refusal: Refused) -> None:
        try:
            way.reply(refusal)
        except (ChannelError, WireError) as error:
            self._warn("refusal not sent", error=str(error))

    def _warn(self, event: str, **fields: object) -> None:
        if (held := self._throttle.passes(event)) is not None:
            self._log.warning(event, held_back=held, **fields)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_DETAIL else f"{text[:_MAX_DETAIL]}..."


def _about(body: msgspec.Struct) -> str:
    """Name of the request that a message is about, where it is about one."""
    return str(getattr(body, "request_id", None) or getattr(body, "id", ""))


def _is_refusal(parts: list[bytes]) -> bool:
    """Whether something unreadable looks like a refusal, which is never answered with another."""
    try:
        header = orjson.loads(parts[0]) if parts else None
    except orjson.JSONDecodeError:
        return False
    body = header.get("body") if isinstance(header, dict) else None
    return isinstance(body, dict) and body.get("type") == Refused.__name__
