"""The client for asyncio: the loop watches the socket, requests wait on events."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, Unpack

from kvferry.answer import Completion, Delta
from kvferry.ask import Ask
from kvferry.exchange import Exchange
from kvferry.limits import CANCEL_TIMEOUT, CONNECT_TIMEOUT, REQUEST_TIMEOUT, no_router, timed_out
from kvferry.link import DEFAULT_ENDPOINT, CurveKeys, Watcher
from kvferry.request import Request


class AsyncClient:
    """A connection to a router, over which any number of requests may be open at once.

    Made and used inside one running event loop. A context manager; `close` stops what is still open.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        timeout: float | None = REQUEST_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        curve: CurveKeys | None = None,
    ) -> None:
        """Begin to connect.

        timeout: seconds that a request may take, None for any; connect_timeout: seconds that a request waits for a
        router to be there. Raises ValueError for an endpoint that ZeroMQ can't read, RuntimeError without a loop.
        """
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Event] = set()
        watcher = Watcher(add=lambda fd: self._loop.add_reader(fd, self._turn), remove=self._loop.remove_reader)
        self._exchange = Exchange(endpoint, curve, watcher)
        self._loop.call_soon(self._turn)

    async def connect(self) -> None:
        """Wait until a router is there; requests do so by themselves. Raises ConnectionLost."""
        news = asyncio.Event()
        self._waiting.add(news)
        try:
            async with asyncio.timeout(self._connect_timeout):
                while not self._exchange.connected:
                    news.clear()
                    await news.wait()
        except TimeoutError:
            raise no_router(self._exchange.link, self._connect_timeout) from None
        finally:
            self._waiting.discard(news)

    async def generate(
        self, prompt: str | None = None, *, timeout: float | None = None, **ask: Unpack[Ask]
    ) -> Completion:
        """Return the whole answer. timeout: seconds, instead of the client's own.

        Raises a KvferryClientError: see `kvferry.errors`. Cancelling the task stops the request on the cluster.
        """
        async with await self.stream(prompt, timeout=timeout, **ask) as stream:
            return await stream.wait()

    async def stream(
        self, prompt: str | None = None, *, timeout: float | None = None, **ask: Unpack[Ask]
    ) -> "AsyncStream":
        """Send a request and return its pieces as an iterator, which raises what `generate` raises."""
        request_id, parts = self._exchange.prepare(prompt, ask)
        seconds = self._timeout if timeout is None else timeout
        deadline = None if seconds is None else self._loop.time() + seconds
        await self.connect()
        news = asyncio.Event()
        request = self._exchange.send(request_id, parts, news.set)
        self._look_soon()
        return AsyncStream(self, request, news, deadline, seconds)

    def cancel(self, request: Request) -> None:
        """Ask the router to stop a request; its stream ends when the router answers."""
        self._exchange.cancel(request)
        self._look_soon()

    def abandon(self, request: Request) -> None:
        """Ask the router to stop a request, and take no more notice of it."""
        self._exchange.abandon(request)
        self._look_soon()

    @property
    def exchange(self) -> Exchange:
        """The open requests and their link."""
        return self._exchange

    async def close(self) -> None:
        """Stop every open request and close the connection."""
        self._exchange.close()
        self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _turn(self) -> None:
        self._exchange.turn()
        self._wake()
        if self._exchange.pending:
            self._look_soon()

    def _wake(self) -> None:
        for news in self._waiting:
            news.set()

    def _look_soon(self) -> None:
        # A ZeroMQ descriptor tells of news once, and sending may have eaten the telling.
        if not self._loop.is_closed():
            self._loop.call_soon(self._turn)


class AsyncStream:
    """The pieces of an answer, as they come. Ends after the last one; `completion` then has the whole.

    Leaving early (close, the end of an `async with`, cancelling the reading task, or dropping the last reference)
    stops the request on the cluster.
    """

    def __init__(
        self, client: AsyncClient, request: Request, news: asyncio.Event, deadline: float | None, seconds: float | None
    ) -> None:
        self._client = client
        self._request = request
        self._news = news
        self._deadline = deadline
        self._seconds = seconds

    @property
    def id(self) -> str:
        """The client's name for the request."""
        return self._request.id

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises RuntimeError before the stream has ended."""
        return self._request.whole()

    async def wait(self) -> Completion:
        """Read to the end and return the whole answer."""
        async for _ in self:
            pass
        return self.completion

    def cancel(self) -> None:
        """Stop the request. Reading on then raises Cancelled, unless the answer was complete before."""
        self._client.cancel(self._request)
        soon = asyncio.get_running_loop().time() + CANCEL_TIMEOUT
        self._deadline = soon if self._deadline is None else min(self._deadline, soon)

    def close(self) -> None:
        """Stop the request if it is not over, and forget it."""
        self._client.abandon(self._request)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._readable()
        except TimeoutError:
            self.close()
            raise timed_out(self._request, self._client.exchange.link, self._seconds) from None
        except asyncio.CancelledError:
            self.close()
            raise
        piece = self._request.next_piece()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def _readable(self) -> None:
        while not self._request.readable:
            self._news.clear()
            await self._news.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._request.over:
            self.close()
