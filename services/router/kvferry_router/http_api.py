"""The OpenAI API over HTTP: models, completions, chat completions."""

import time
from typing import cast

from kvferry_proto.errors import KvferryError
from kvferry_proto.timeline import now
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from kvferry_router.dispatch import Dispatcher
from kvferry_router.handle import RequestHandle
from kvferry_router.http_errors import OrjsonResponse, error_response
from kvferry_router.http_stream import Events, Whole
from kvferry_router.job import Job
from kvferry_router.jobs import JobMaker
from kvferry_router.metrics import RouterMetrics
from kvferry_router.openai_parse import parse
from kvferry_router.openai_replies import CHAT, COMPLETIONS, Reply, Style
from kvferry_router.openai_types import ChatRequest, Common, CompletionRequest
from kvferry_router.settings import RouterSettings
from kvferry_router.tokenizer import Tokenizer

TIMELINE_HEADER = "x-kvferry-timeline"
CLIENT_GONE = 499


class Api:
    """The endpoints and what they need."""

    def __init__(
        self,
        settings: RouterSettings,
        dispatcher: Dispatcher,
        jobs: JobMaker,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._started = int(time.time())

    def routes(self) -> list[BaseRoute]:
        """Return the routes under /v1."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        self._count("models", 200)
        return OrjsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        try:
            self._jobs.check_model(request.path_params["name"])
        except KvferryError as error:
            return self._refuse("models", error)
        self._count("models", 200)
        return OrjsonResponse(self._model())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, COMPLETIONS)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, CHAT)

    async def _answer(self, request: Request, style: Style) -> Response:
        received, answer_id = now(), style.new_id()
        try:
            asked: Common = parse(await self._read(request), style.request)
            handles = self._submit(await self._make(asked, received), answer_id)
        except KvferryError as error:
            return self._refuse(style.endpoint, error)
        except ClientDisconnect:
            self._count(style.endpoint, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        except HTTPException as error:
            self._count(style.endpoint, error.status_code)
            raise
        timeline = bool(asked.kvferry_timeline) or request.headers.get(TIMELINE_HEADER) == "1"
        reply = Reply(
            style,
            self._settings.model_name,
            self._tokenizer,
            asked,
            handles,
            answer_id=answer_id,
            timeline=timeline,
        )
        app: ASGIApp = (Events if asked.stream else Whole)(
            reply, handles, lambda status: self._count(style.endpoint, status)
        )
        # An endpoint's answer is called as an ASGI application; these two are nothing else.
        return cast("Response", app)

    async def _make(self, asked: Common, received: int) -> list[Job]:
        match asked:
            case CompletionRequest():
                return await self._jobs.completion(asked, received)
            case ChatRequest():
                return [await self._jobs.chat(asked, received)]
        msg = f"no way to answer a {type(asked).__name__}"
        raise TypeError(msg)

    def _submit(self, jobs: list[Job], answer_id: str) -> list[RequestHandle]:
        """Submit all or none. Raises KvferryError."""
        handles: list[RequestHandle] = []
        try:
            for job in jobs:
                handles.append(self._dispatcher.submit(job, answer_id))  # noqa: PERF401  # those before a failure must be known
        except KvferryError:
            for handle in handles:
                handle.cancel()
            raise
        return handles

    async def _read(self, request: Request) -> bytes:
        """Return the body. Raises HTTPException 413, ClientDisconnect."""
        limit = self._settings.max_body_bytes
        announced = request.headers.get("content-length", "")
        too_large = HTTPException(413, f"the body is larger than the {limit} bytes that are taken")
        if announced.isdigit() and int(announced) > limit:
            raise too_large
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
        return b"".join(parts)

    def _refuse(self, endpoint: str, error: KvferryError) -> Response:
        self._count(endpoint, error.error.status)
        return error_response(error)

    def _count(self, endpoint: str, status: int) -> None:
        self._metrics.requests.labels(endpoint, str(status)).inc()

    def _model(self) -> dict[str, object]:
        return {"id": self._settings.model_name, "object": "model", "created": self._started, "owned_by": "kvferry"}
