"""The client for ordinary code: no thread and no event loop, the caller's thread does the waiting."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self, Unpack

from kvferry.answer import Completion, Delta
from kvferry.ask import Ask
from kvferry.exchange import Exchange
from kvferry.limits import CANCEL_TIMEOUT, CONNECT_TIMEOUT, REQUEST_TIMEOUT, timed_out
from kvferry.link import DEFAULT_ENDPOINT, CurveKeys
from kvferry.pump import Pump
from kvferry.request import Request


class Client:
    """A connection to a router, over which any number of requests may be open at once.

    For one thread: streams of a client may be read in turns, but two threads need a client each (calling one from
    two threads at the same moment raises RuntimeError). A context manager; `close` stops what is still open.
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
        router to be there. Raises ValueError for an endpoint that ZeroMQ can't read.
        """
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._pump = Pump(Exchange(endpoint, curve))

    def connect(self) -> None:
        """Wait until a router is there; requests do so by themselves. Raises ConnectionLost."""
        with self._pump.alone():
            self._pump.connect(self._connect_timeout)

    def generate(self, prompt: str | None = None, *, timeout: float | None = None, **ask: Unpack[Ask]) -> Completion:
        """Return the whole answer. timeout: seconds, instead of the client's own.

        Raises a KvferryClientError: see `kvferry.errors`.
        """
        with self.stream(prompt, timeout=timeout, **ask) as stream:
            return stream.wait()

    def stream(self, prompt: str | None = None, *, timeout: float | None = None, **ask: Unpack[Ask]) -> "Stream":
        """Send a request and return its pieces as an iterator, which raises what `generate` raises."""
        exchange = self._pump.exchange
        with self._pump.alone():
            request_id, parts = exchange.prepare(prompt, ask)
            seconds = self._timeout if timeout is None else timeout
            deadline = None if seconds is None else time.monotonic() + seconds
            self._pump.connect(self._connect_timeout)
            return Stream(self._pump, exchange.send(request_id, parts), deadline, seconds)

    def close(self) -> None:
        """Stop every open request and close the connection."""
        self._pump.exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """The pieces of an answer, as they come. Ends after the last one; `completion` then has the whole.

    Leaving early (close, the end of a `with`, or dropping the last reference) stops the request on the cluster.
    """

    def __init__(self, pump: Pump, request: Request, deadline: float | None, seconds: float | None) -> None:
        self._pump = pump
        self._request = request
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

    def wait(self) -> Completion:
        """Read to the end and return the whole answer."""
        for _ in self:
            pass
        return self.completion

    def cancel(self) -> None:
        """Stop the request. Reading on then raises Cancelled, unless the answer was complete before."""
        with self._pump.alone():
            self._pump.exchange.cancel(self._request)
        soon = time.monotonic() + CANCEL_TIMEOUT
        self._deadline = soon if self._deadline is None else min(self._deadline, soon)

    def close(self) -> None:
        """Stop the request if it is not over, and forget it."""
        self._pump.exchange.abandon(self._request)

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        request = self._request
        with self._pump.alone():
            ready = self._pump.until(lambda: request.readable, self._deadline)
        if not ready:
            self.close()
            raise timed_out(request, self._pump.exchange.link, self._seconds)
        piece = request.next_piece()
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
