"""Check of Redis: a server to start, or one to reach."""

import shutil

import click
from kvferry_proto.redis_url import without_password

from kvferry.cli.doctor.finding import Finding, fail, ok
from kvferry.cli.up.check import redis_refusal
from kvferry.cli.up.redis import unreachable

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
    shown = without_password(url)
    why = unreachable(url)
    if why is None and (refused := _refusal(url)):
        why = f"{shown} {refused}"
    return ok("redis", f"something listens at {shown}") if why is None else fail("redis", why, ADVICE)


def _refusal(url: str) -> str | None:
    """Ask as a service would; where none is installed, that something listens is enough."""
    try:
        return redis_refusal(url)
    except click.ClickException:
        return None
