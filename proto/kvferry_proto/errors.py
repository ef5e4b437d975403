"""How a failure is told: a code with an HTTP status, the phase it happened in, the node that saw it."""

import enum

import msgspec


class Phase(enum.StrEnum):
    """Where in a request's way something went wrong."""

    ROUTE = "route"
    ASSIGN = "assign"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


class ErrorCode(enum.StrEnum):
    """What went wrong; `HTTP_STATUS` has the status that a client sees."""

    BAD_REQUEST = "bad_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    MODEL_NOT_FOUND = "model_not_found"
    OVERLOADED = "overloaded"
    NO_NODES = "no_nodes"
    DRAINING = "draining"
    NODE_LOST = "node_lost"
    STALE_INCARNATION = "stale_incarnation"
    LAYOUT_MISMATCH = "layout_mismatch"
    TRANSFER_FAILED = "transfer_failed"
    VERIFY_FAILED = "verify_failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    PROTOCOL = "protocol"
    INTERNAL = "internal"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.PROMPT_TOO_LONG: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.NO_NODES: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.NODE_LOST: 503,
    ErrorCode.STALE_INCARNATION: 503,
    ErrorCode.LAYOUT_MISMATCH: 500,
    ErrorCode.TRANSFER_FAILED: 502,
    ErrorCode.VERIFY_FAILED: 502,
    ErrorCode.TIMEOUT: 504,
    # Nobody reads it: the client has left. Kept for the books, as nginx does.
    ErrorCode.CANCELLED: 499,
    ErrorCode.PROTOCOL: 400,
    ErrorCode.INTERNAL: 500,
}

# Another node may well succeed where this one could not, so the router tries once more elsewhere.
RETRYABLE = frozenset(
    {
        ErrorCode.OVERLOADED,
        ErrorCode.DRAINING,
        ErrorCode.NODE_LOST,
        ErrorCode.STALE_INCARNATION,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.TIMEOUT,
    }
)


MAX_MESSAGE = 1000
"""Characters of an error's text; what is longer is cut."""


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    """A failure as it travels: node to node, and to the client."""

    code: ErrorCode
    message: str
    phase: Phase
    node: str = ""
    retry_after: float | None = None
    """Seconds after which trying again makes sense."""
    param: str = ""
    """The field of the request that is wrong, by the name that its sender gave it; "" where none is to blame."""
    avoid: bool = True
    """Whether another try is to do without `node`; False where it lives, and only what it did was lost."""

    def __post_init__(self) -> None:
        # Messages quote what was wrong, which may be a megabyte: an error must always be small enough to be sent.
        if len(self.message) > MAX_MESSAGE:
            msgspec.structs.force_setattr(self, "message", f"{self.message[:MAX_MESSAGE]}...")

    @property
    def status(self) -> int:
        """HTTP status."""
        return HTTP_STATUS[self.code]

    @property
    def retryable(self) -> bool:
        """Whether another node may succeed."""
        return self.code in RETRYABLE


class KvferryError(Exception):
    """Raised where a `RequestError` ends a request; `error` is what the client is told."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(f"{error.message} ({error.code}, phase {error.phase}, node {error.node or 'unknown'})")
        self.error = error


def fail(code: ErrorCode, message: str, phase: Phase, node: str = "", retry_after: float | None = None) -> KvferryError:
    """Build the exception to raise."""
    return KvferryError(RequestError(code=code, message=message, phase=phase, node=node, retry_after=retry_after))
