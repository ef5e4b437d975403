"""What a client can catch: one exception per kind of failure, each saying where it happened."""
# Callers write `except Overloaded`, as they would for a builtin such as KeyboardInterrupt; the base ends in Error.
# ruff: noqa: N818

from kvferry_proto.errors import ErrorCode, Phase, RequestError


class KvferryClientError(Exception):
    """Base of everything that this library raises about a request."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        phase: Phase | None = None,
        node: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        """One word: a value of `kvferry_proto.errors.ErrorCode`, or "connection_lost"."""
        self.phase = phase
        """Where in the request's way it happened; None: before it reached the cluster."""
        self.node = node
        """Node that saw it, or the endpoint of the router; "" where nobody knows."""
        self.retry_after = retry_after
        """Seconds after which trying again makes sense; None: nobody said."""

    def __str__(self) -> str:
        where = [f"phase {self.phase}" if self.phase else "", f"node {self.node}" if self.node else ""]
        told = ", ".join([self.code, *filter(None, where)])
        return f"{self.message} ({told})"


class BadRequest(KvferryClientError):
    """The request itself is wrong: sending it again will not help."""


class PromptTooLong(BadRequest):
    """Prompt and answer together are longer than the model or the nodes take."""


class ModelNotFound(BadRequest):
    """No node serves a model of that name."""


class Unavailable(KvferryClientError):
    """The cluster can't answer now; the same request may work later."""


class Overloaded(Unavailable):
    """Every queue is full. `retry_after` says when to come back."""


class NoNodes(Unavailable):
    """A role that the request needs has no live node."""


class Draining(Unavailable):
    """The node is going away and takes nothing new."""


class NodeLost(Unavailable):
    """A node that worked on the request is gone, and no other could take over."""


class TransferFailed(KvferryClientError):
    """The KV cache could not be carried, or did not arrive as it was sent."""


class RequestTimeout(KvferryClientError, TimeoutError):
    """The request did not end in the time that it was given, here or on a node."""


class Cancelled(KvferryClientError):
    """The request was stopped at the client's wish."""


class ProtocolError(KvferryClientError):
    """Client and router do not understand each other: most likely their versions differ."""


class ServerError(KvferryClientError):
    """Something broke on a node. Its log has the rest."""


class ConnectionLost(Unavailable, ConnectionError):
    """The router could not be reached, or went away while it was answering."""


EXCEPTIONS: dict[ErrorCode, type[KvferryClientError]] = {
    ErrorCode.BAD_REQUEST: BadRequest,
    ErrorCode.PROMPT_TOO_LONG: PromptTooLong,
    ErrorCode.MODEL_NOT_FOUND: ModelNotFound,
    ErrorCode.OVERLOADED: Overloaded,
    ErrorCode.NO_NODES: NoNodes,
    ErrorCode.DRAINING: Draining,
    ErrorCode.NODE_LOST: NodeLost,
    ErrorCode.STALE_INCARNATION: NodeLost,
    ErrorCode.LAYOUT_MISMATCH: TransferFailed,
    ErrorCode.TRANSFER_FAILED: TransferFailed,
    ErrorCode.VERIFY_FAILED: TransferFailed,
    ErrorCode.TIMEOUT: RequestTimeout,
    ErrorCode.CANCELLED: Cancelled,
    ErrorCode.PROTOCOL: ProtocolError,
    ErrorCode.INTERNAL: ServerError,
}


def from_request_error(error: RequestError) -> KvferryClientError:
    """Build the exception for what the cluster told about a request."""
    kind = EXCEPTIONS[error.code]
    return kind(error.message, code=error.code, phase=error.phase, node=error.node, retry_after=error.retry_after)


def bad_request(message: str) -> BadRequest:
    """Build the exception for a request that is wrong before it leaves."""
    return BadRequest(message, code=ErrorCode.BAD_REQUEST)


def connection_lost(message: str, endpoint: str) -> ConnectionLost:
    """Build the exception for a router that is not there (any more)."""
    return ConnectionLost(message, code="connection_lost", node=endpoint)
