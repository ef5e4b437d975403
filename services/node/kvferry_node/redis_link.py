"""Connections to Redis, and the keys that a cluster has there. docs/architecture.md describes what they hold.

NAMESPACE:nodes                    hash: node id -> incarnation (hex); who should be there
NAMESPACE:members                  stream: join, leave, lost, draining events, for waking up; trimmed
NAMESPACE:node:ID                  hash under the node's lease: its record and load
NAMESPACE:held:ID:INCARNATION      hash: request id -> "expires pages tokens", reservations not yet admitted
"""

import asyncio
import contextlib
import importlib.resources
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from redis import Redis as BlockingRedis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry as BlockingRetry

__all__ = [
    "AsyncScript",
    "Client",
    "NoAnswer",
    "RedisError",
    "Unreachable",
    "connect",
    "refusal",
    "script",
    "trouble",
    "within",
]

Client: TypeAlias = Redis

# What is raised when a call did not come back: redis-py's own errors, a socket's, and ours when it took too long.
Unreachable = (RedisError, OSError, TimeoutError)


LATE_SECONDS = 0.25
"""A process that runs so late may have left an answer unread, which says nothing of Redis."""


CHECK_SECONDS = 1.0
"""What `refusal` gives a Redis to answer; one that takes longer is waited for as one that is not there yet."""

PASSING = ("BUSY ", "MISCONF ")
"""How a Redis begins that can't serve now: it runs a script, or its disk is full. It may be able to later."""


class NoAnswer(TimeoutError):  # noqa: N818  # the name says it
    """Redis has not answered in time."""

    def __init__(self, seconds: float, late: float) -> None:
        """`late`: seconds after its time that the timeout was seen, by a loop that was busy or stood still."""
        self.ours = late >= LATE_SECONDS
        """Whether that may be this process's own doing."""
        own = f", and this process itself was {late:.2f} s late" if self.ours else ""
        super().__init__(f"no answer within {seconds:g} s{own}")


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Give the calls in the block so long. Raises NoAnswer, which says more than a TimeoutError's empty text."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        deadline = limit.when()
        if not limit.expired() or deadline is None:
            raise
        raise NoAnswer(seconds, asyncio.get_running_loop().time() - deadline) from error


def trouble(error: BaseException) -> tuple[str, str]:
    """Return what is wrong with Redis, and the details of it, for a log line."""
    if isinstance(error, AuthenticationError):
        what = "redis lets nobody in"
    else:
        what = "redis does not answer" if isinstance(error, NoAnswer) else "redis is unreachable"
    return what, str(error) or type(error).__name__


def refusal(url: str) -> str | None:
    """Return what is wrong with the Redis at `url`, or with the URL, that no waiting mends; None where nothing is.

    A predicate, "lets nobody in: ..." say, without the password. Blocks for a moment. A Redis that is not there, or
    busy, refuses nothing: it may come yet.
    """
    seconds, retry = CHECK_SECONDS, BlockingRetry(NoBackoff(), 0)
    try:
        client = BlockingRedis.from_url(
            url, socket_connect_timeout=seconds, socket_timeout=seconds, protocol=2, retry=retry
        )
        client.connection_pool.make_connection()
    except (ValueError, TypeError):
        # What they say may quote the password.
        return "can't be found: the URL can't be read (in a password, write / ? # @ % as %2F %3F %23 %40 %25)"
    with contextlib.closing(client):
        why = _refused(client)
    password = client.connection_pool.connection_kwargs.get("password")
    # A server that does not know AUTH quotes what came with it.
    return why.replace(password, "***") if why and password else why


def _refused(client: BlockingRedis) -> str | None:
    try:
        client.ping()
    except NoPermissionError:
        # It has let us in, and what this user may do is not for a ping to say.
        return None
    except (AuthenticationError, ResponseError) as error:
        return None if str(error).startswith(PASSING) else f"lets nobody in: {error}"
    except RedisError:
        return None
    return None


def connect(url: str, *, connections: int = 1) -> Client:
    """Return a client with at most `connections` connections, which retries nothing. Close it with `aclose`.

    It has no timeouts: callers put `within` around their calls. redis-py's own write timeout is made with
    asyncio.wait_for, which before Python 3.12 now and then swallows a cancellation, and then a node never ends.
    """
    pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=None,
        socket_timeout=None,
        socket_connect_timeout=None,
        decode_responses=True,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


def script(client: Client, name: str) -> AsyncScript:
    """Return the Lua script `name`.lua beside this module; called by its hash, and loaded again where it is unknown."""
    text = (importlib.resources.files("kvferry_node") / f"{name}.lua").read_text()
    registered = client.register_script(text)
    assert isinstance(registered, AsyncScript)
    return registered
