"""Errors over HTTP: OpenAI's envelope, with the phase and the node beside it."""

import math
from http import HTTPStatus
from typing import Any

import orjson
from kvferry_proto.errors import ErrorCode, KvferryError, Phase, RequestError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
_ADVICE = {
    404: "no such path; there are /v1/models, /v1/completions and /v1/chat/completions, and /health, /ready, /metrics, "
    "/state",
    405: "this path takes {allowed}",
}
_PATH = 200
"""Characters of a path that an error quotes."""
_RETRY_LATER = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


class OrjsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401  # anything that JSON holds
        """Encode the body."""
        return orjson.dumps(content)


def envelope(error: RequestError) -> dict[str, Any]:
    """Return the body that tells `error`."""
    return _envelope(error.message, error.status, error.code, error.param, phase=error.phase, node=error.node)


def _envelope(message: str, status: int, code: str, param: str = "", **more: str) -> dict[str, Any]:
    kind = _TYPES.get(HTTPStatus(status)) if status != 499 else "cancelled_error"
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code, **more}}


def error_response(failure: KvferryError) -> Response:
    """Return the answer to a request that failed before anything was streamed."""
    error = failure.error
    headers = {}
    if error.status in _RETRY_LATER:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1)))
    return OrjsonResponse(envelope(error), status_code=error.status, headers=headers)


async def http_exception(request: Request, error: Exception) -> Response:
    """Put starlette's own refusals (404, 405, 413) into the envelope."""
    assert isinstance(error, HTTPException)
    detail = _ADVICE.get(error.status_code, error.detail)
    if error.status_code in _ADVICE:
        allowed = (error.headers or {}).get("Allow", "")
        detail = f"{request.method} {request.url.path[:_PATH]}: {detail.format(allowed=allowed)}"
    code = _CODES.get(error.status_code, "http_error")
    return OrjsonResponse(
        _envelope(detail, error.status_code, code), status_code=error.status_code, headers=error.headers
    )


async def unexpected(_request: Request, _error: Exception) -> Response:
    """Answer a bug; starlette raises the exception again after that, so it is logged."""
    error = RequestError(code=ErrorCode.INTERNAL, message="internal error in the router", phase=Phase.ROUTE)
    return OrjsonResponse(envelope(error), status_code=error.status)
