"""Refusing a request: what was wrong with which field."""

from kvferry_proto.errors import ErrorCode, KvferryError, Phase, RequestError


class BadRequest(KvferryError):  # noqa: N818  # the name says it
    """The client's mistake. `param` is the field; nothing of it counts against a node."""

    def __init__(self, message: str, param: str = "", code: ErrorCode = ErrorCode.BAD_REQUEST) -> None:
        super().__init__(RequestError(code=code, message=message, phase=Phase.ROUTE, param=param))
