"""How long a client waits, and what it says when that was not enough."""

from kvferry_proto.errors import ErrorCode, Phase

from kvferry.errors import ConnectionLost, RequestTimeout, connection_lost
from kvferry.link import Link, LinkState
from kvferry.request import Request, RequestState

REQUEST_TIMEOUT = 600.0
"""Seconds from asking to the last token; the longest answers of slow machines fit."""
CONNECT_TIMEOUT = 10.0
"""Seconds that a request waits for a router to be there."""
CANCEL_TIMEOUT = 10.0
"""Seconds that a cancelled request may take to say so."""


def no_router(link: Link, seconds: float) -> ConnectionLost:
    """Build the exception for a router that did not appear in time."""
    if link.state is LinkState.REFUSED:
        return connection_lost("who answers there is no kvferry router, or does not accept our keys", link.endpoint)
    return connection_lost(f"no router answered within {seconds:g} s", link.endpoint)


def timed_out(request: Request, link: Link, seconds: float | None) -> RequestTimeout:
    """Build the exception for an answer that did not end in time."""
    begun = request.state is RequestState.ANSWERING
    what = "the answer did not end" if begun else "no answer came"
    within = "" if seconds is None else f" within {seconds:g} s"
    phase = Phase.DECODE if begun else Phase.ROUTE
    return RequestTimeout(what + within, code=ErrorCode.TIMEOUT, phase=phase, node=link.endpoint)
