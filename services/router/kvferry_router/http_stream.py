"""The two ways to send an answer over HTTP, and what happens when the client leaves meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
from kvferry_proto.errors import KvferryError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry_router.handle import RequestHandle, merge
from kvferry_router.http_errors import OrjsonResponse, envelope, error_response
from kvferry_router.job import Outcome
from kvferry_router.openai_replies import Reply

Count = Callable[[int], None]
"""Enters the final status of a request into the books."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Whole:
    """Sends the answer when it is complete."""

    def __init__(self, reply: Reply, handles: list[RequestHandle], count: Count) -> None:
        self._reply = reply
        self._handles = handles
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait, answer."""
        async with cancelled_with_client(receive, self._handles):
            response = await self._response()
            self._count(response.status_code)
            await response(scope, receive, send)

    async def _response(self) -> Response:
        try:
            # Should one fail, the others are cancelled when the block around this is left.
            answers = await asyncio.gather(*(handle.answer() for handle in self._handles))
        except KvferryError as error:
            return error_response(error)
        return OrjsonResponse(self._reply.whole(answers))


class Events:
    """Sends the answer as it grows, as server-sent events."""

    def __init__(self, reply: Reply, handles: list[RequestHandle], count: Count) -> None:
        self._reply = reply
        self._handles = handles
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hold the status back until the first event: what fails before it gets a status of its own."""
        async with cancelled_with_client(receive, self._handles):
            events = self._events()
            try:
                first = await anext(events)
            except KvferryError as error:
                self._count(error.error.status)
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await _send(send, first)
            self._count(await self._rest(events, send))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _rest(self, events: AsyncIterator[bytes], send: Send) -> int:
        try:
            async for event in events:
                await _send(send, event)
        except KvferryError as error:
            await _send(send, _event(envelope(error.error)))
            return error.error.status
        await _send(send, b"data: [DONE]\n\n")
        return 200

    async def _events(self) -> AsyncIterator[bytes]:
        reply = self._reply
        outcomes: dict[int, Outcome] = {}
        async for index, item in merge(self._handles):
            if isinstance(item, Outcome):
                outcomes[index] = item
                yield _event(reply.last(index, item))
            elif (chunk := reply.choices[index].chunk(item)) is not None:
                yield _event(reply.chunk(chunk))
        if reply.with_usage:
            yield _event(reply.usage([outcomes[index] for index in sorted(outcomes)]))


@asynccontextmanager
async def cancelled_with_client(receive: Receive, handles: list[RequestHandle]) -> AsyncIterator[None]:
    """Cancel the requests when the client leaves; and in any case when the block is left."""
    watch = asyncio.ensure_future(_watch(receive, handles))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        _cancel(handles)


async def _watch(receive: Receive, handles: list[RequestHandle]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    _cancel(handles)


def _cancel(handles: list[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()


def _event(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
