"""Connections to Redis, and the keys that a cluster has there. docs/architecture.md describes what they hold.

NAMESPACE:nodes                    hash: node id -> incarnation (hex); who should be there
NAMESPACE:members                  stream: join, leave, lost, draining events, for waking up; trimmed
NAMESPACE:node:ID                  hash under the node's lease: its record and load
NAMESPACE:held:ID:INCARNATION      hash: request id -> "expires pages tokens", reservations not yet admitted
"""

import importlib.resources
from typing import TypeAlias

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

__all__ = ["AsyncScript", "Client", "RedisError", "Unreachable", "connect", "script"]

Client: TypeAlias = Redis

# What is raised when a call did not come back: redis-py's own errors, a socket's, and ours when it took too long.
Unreachable = (RedisError, OSError, TimeoutError)


def connect(url: str, *, connections: int = 1) -> Client:
    """Return a client with at most `connections` connections, which retries nothing. Close it with `aclose`.

    It has no timeouts: callers put `asyncio.timeout` around their calls. redis-py's own write timeout is made with
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
