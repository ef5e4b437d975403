"""All requests of one client over one link: numbering, sending, and handing what arrives to its request.

Knows no event loop and never waits; the sync and the async client drive it in their own ways.
"""

import logging
import secrets
from collections.abc import Callable

import msgspec
from kvferry_proto.codec import WireError, decode, encode
from kvferry_proto.errors import ErrorCode, Phase
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef, new_incarnation
from kvferry_proto.to_client import ToClient
from kvferry_proto.to_router import CancelGenerate, Generate

from kvferry.ask import Ask, to_generate
from kvferry.errors import EXCEPTIONS, KvferryClientError, Overloaded, ProtocolError, bad_request, connection_lost
from kvferry.link import CurveKeys, Link, LinkState, Watcher
from kvferry.request import Request, RequestState

_log = logging.getLogger("kvferry")


class Exchange:
    """The requests open on a link. Not thread-safe."""

    def __init__(self, endpoint: str, curve: CurveKeys | None = None, watcher: Watcher | None = None) -> None:
        self._ref = NodeRef(f"client-{secrets.token_hex(6)}", new_incarnation())
        self.link = Link(self._ref, endpoint, curve, watcher)
        self._open: dict[str, Request] = {}
        self._drawn = 0

    def __len__(self) -> int:
        """Requests that are open."""
        return len(self._open)

    @property
    def connected(self) -> bool:
        """Whether a router is at the other end. Raises RuntimeError once the client is closed."""
        if self.link.state is LinkState.CLOSED:
            msg = "the client is closed"
            raise RuntimeError(msg)
        return self.link.state is LinkState.UP

    @property
    def pending(self) -> bool:
        """Whether `turn` has something to do."""
        return self.link.state is not LinkState.CLOSED and self.link.pending

    def prepare(self, prompt: str | None, ask: Ask) -> tuple[str, list[bytes]]:
        """Return a new request's id and the parts to send. Raises BadRequest."""
        self._drawn += 1
        request_id = f"r{self._drawn}"
        try:
            parts = encode(self._ref, to_generate(request_id, prompt, ask))
            decode(parts, Generate)
        except WireError as error:
            raise bad_request(error.detail) from None
        except (TypeError, msgspec.ValidationError) as error:
            raise bad_request(str(error)) from None
        return request_id, parts

    def send(self, request_id: str, parts: list[bytes], on_news: Callable[[], None] | None = None) -> Request:
        """Send a prepared request. Raises ConnectionLost or Overloaded if the socket does not take it."""
        if not self.link.send(parts):
            if self.connected:
                msg = "the router takes messages too slowly: the client's send queue is full"
                raise Overloaded(msg, code=ErrorCode.OVERLOADED, node=self.link.endpoint)
            msg = "the connection to the router was lost before the request could be sent"
            raise connection_lost(msg, self.link.endpoint)
        request = Request(request_id, on_news)
        self._open[request_id] = request
        return request

    def cancel(self, request: Request) -> bool:
        """Ask the router to stop; returns whether it could be asked. The request stays open until it answers."""
        if request.over or request.id not in self._open:
            return False
        return self.link.send(encode(self._ref, CancelGenerate(id=request.id)))

    def abandon(self, request: Request) -> None:
        """Ask the router to stop, and take no more notice of what it answers."""
        self.cancel(request)
        self._open.pop(request.id, None)

    def turn(self) -> None:
        """Take in all that has arrived, and fail what was open if the connection was lost."""
        if self.link.state is LinkState.CLOSED:
            return
        lost = self.link.check()
        # What came before the break still counts.
        for parts in self.link.receive():
            self._take(parts)
        if lost:
            self.link.renew()
            self.fail_all("the connection to the router was lost while it was answering")

    def fail_all(self, message: str) -> None:
        """End every open request with ConnectionLost."""
        self._fail(list(self._open.values()), lambda: connection_lost(message, self.link.endpoint))

    def close(self) -> None:
        """Stop every open request and close the link."""
        if self.link.state is LinkState.CLOSED:
            return
        for request in list(self._open.values()):
            self.cancel(request)
        self.fail_all("the client was closed")
        self.link.close()

    def _take(self, parts: list[bytes]) -> None:
        try:
            body = decode(parts, ToClient).body
        except WireError as error:
            _log.warning("a message of the router could not be read: %s", error)
            self._fail_unreadable(error)
            return
        if isinstance(body, Refused):
            self._take_refusal(body)
            return
        request = self._open.get(body.id)
        if request is not None:
            request.take(body)
            if request.over:
                del self._open[request.id]

    def _take_refusal(self, refused: Refused) -> None:
        """Without a name, a refusal meant a request that the router has said nothing about yet."""
        named = refused.about != ""
        code = ErrorCode(refused.reason) if refused.reason in set(ErrorCode) else ErrorCode.PROTOCOL
        message = f"the router refused the message: {refused.reason}: {refused.detail}"
        self._fail(
            [
                request
                for request in self._open.values()
                if (request.id == refused.about if named else request.state is RequestState.SENT)
            ],
            lambda: EXCEPTIONS[code](message, code=code, phase=Phase.ROUTE, node=self.link.endpoint),
        )

    def _fail_unreadable(self, error: WireError) -> None:
        """Some answer now has a hole, and nobody can say which: none may be taken for whole."""
        message = f"the router sent what this client can't read: {error}"
        for request in list(self._open.values()):
            self.cancel(request)
        self._fail(
            list(self._open.values()),
            lambda: ProtocolError(message, code=ErrorCode.PROTOCOL, phase=Phase.ROUTE, node=self.link.endpoint),
        )

    def _fail(self, requests: list[Request], error: Callable[[], KvferryClientError]) -> None:
        for request in requests:
            self._open.pop(request.id, None)
            request.fail(error())
