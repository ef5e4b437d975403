"""Checks of Redis: a server to start, or one to reach."""

import asyncio
import os
import shutil
import socket
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvferry.cli.doctor.finding import Finding, fail, ok
from kvferry.cli.up.redis import ping

CONNECT_SECONDS = 2.0
DEFAULT_PORT = 6379


def redis(url: str | None) -> Finding:
    """The Redis at `url`, or without one the program that `kvferry up` starts."""
    if url:
        return _reach(url)
    binary = shutil.which("redis-server")
    if binary is None:
        advice = "apt-get install redis-server, or set REDIS_URL to a running Redis"
        return fail("redis", "redis-server is not installed and REDIS_URL is not set", advice)
    return ok("redis", f"{binary} (kvferry up starts its own)")


def configured_url() -> str | None:
    """Return the URL that the services would take from the environment."""
    return os.environ.get("KVFERRY_REDIS_URL") or os.environ.get("REDIS_URL") or None


def _reach(url: str) -> Finding:
    parts = urlsplit(url)
    shown = url if parts.password is None else url.replace(parts.password, "***")
    advice = "start it, or correct REDIS_URL (unset, kvferry up starts a Redis of its own)"
    try:
        if parts.scheme == "unix":
            why = asyncio.run(ping(Path(unquote(parts.path))))
            return ok("redis", f"answers at {shown}") if why is None else fail("redis", why, advice)
        if parts.scheme not in {"redis", "rediss"}:
            return fail("redis", f"{shown} is no Redis URL", "REDIS_URL is redis://HOST:PORT/DB or unix:///SOCKET")
        # A server that wants a password or TLS does not answer a plain PING; that it listens is enough.
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or DEFAULT_PORT), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return fail("redis", f"{shown}: {error}", advice)
    return ok("redis", f"something listens at {shown}")
