"""Check of Redis: a server to start, or one to reach."""

import shutil

from kvferry.cli.doctor.finding import Finding, fail, ok
from kvferry.cli.up.redis import unreachable, without_password

ADVICE = (
    "start it, or correct REDIS_URL, which is redis://HOST:PORT/DB or unix:///SOCKET "
    "(unset, kvferry up starts a Redis of its own)"
)


def redis(url: str | None) -> Finding:
    """The Redis at `url`, or without one the program that `kvferry up` starts."""
    if url:
        return _reach(url)
    binary = shutil.which("redis-server")
    if binary is None:
        advice = "apt-get install redis-server, or set REDIS_URL to a running Redis"
        return fail("redis", "redis-server is not installed and REDIS_URL is not set", advice)
    return ok("redis", f"{binary} (kvferry up starts its own)")


def _reach(url: str) -> Finding:
    why = unreachable(url)
    return ok("redis", f"something listens at {without_password(url)}") if why is None else fail("redis", why, ADVICE)
