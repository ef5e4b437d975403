"""What operators and their tools read from a node: /health, /ready, /metrics, /state."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvferry_node.addresses import authority, resolve
from kvferry_node.errors import BindError


def ops_routes(
    state: Callable[[], dict[str, Any]], ready: Callable[[], str | None], registry: CollectorRegistry
) -> list[Route]:
    """Return the routes; `ready` says why the node cannot serve now, or None when it can."""

    async def health(_request: Request) -> Response:
        return _json({"status": "alive"})

    async def readiness(_request: Request) -> Response:
        why = ready()
        return _json({"status": "ready"}) if why is None else _json({"status": "not ready", "reason": why}, 503)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def show(_request: Request) -> Response:
        return _json(state())

    return [
        Route("/health", health),
        Route("/ready", readiness),
        Route("/metrics", metrics),
        Route("/state", show),
    ]


def ops_app(
    state: Callable[[], dict[str, Any]], ready: Callable[[], str | None], registry: CollectorRegistry
) -> Starlette:
    """Return an application of these routes alone."""
    return Starlette(routes=ops_routes(state, ready, registry))


class HttpServer:
    """A running HTTP server inside the event loop."""

    def __init__(self, server: "_Server", task: asyncio.Task[None], address: str, port: int) -> None:
        self._server = server
        self._task = task
        self.port = port
        self.url = f"http://{authority(address, port)}"

    async def wait(self) -> None:
        """Return when the server has ended; raise what ended it."""
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Take no new connections, let running requests end within the graceful time, close."""
        self._server.end()
        await self._task


async def serve_http(app: ASGIApp, host: str, port: int, *, graceful_seconds: float = 5.0) -> tuple[HttpServer, int]:
    """Serve `app` and return the server with the port that it is bound to.

    `graceful_seconds`: how long `stop` waits for requests that still run. Raises BindError.
    """
    address = resolve(host)
    listener = _listen(address, port)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(graceful_seconds)),
    )
    server = _Server(config)
    task = asyncio.create_task(_serve(server, listener), name="http")
    bound: int = listener.getsockname()[1]
    return HttpServer(server, task, address, bound), bound


class _Server(uvicorn.Server):
    """The service, not uvicorn, decides what a signal means, and says when to end: nothing looks for it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        # As uvicorn's, which wakes up ten times a second; once is enough for the Date header.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        msg = f"cannot bind to {authority(address, port)} (--host, --http-port): {error.strerror}"
        raise BindError(msg) from None
    # Connections made before the server's first turn wait in the backlog.
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content, default=str), status, media_type="application/json")
