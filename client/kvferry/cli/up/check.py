"""Asks the services, before any starts, whether they would with what `kvferry up` was asked for."""

from dataclasses import replace
from typing import Protocol

import click

from kvferry.cli.root import service
from kvferry.cli.up.plan import ClusterOptions, command_line

RANKS = {"prefiller": "--prefill-tp", "decoder": "--decode-tp"}
"""What we call a service's --tp."""


class Settings(Protocol):
    """What a service would run with."""

    drain_seconds: float


class Checkable(Protocol):
    """A service's command."""

    def check(self, args: list[str]) -> Settings:
        """Read and check a command line. Raises UsageError."""

    def redis_refusal(self, url: str) -> str | None:
        """Say what is wrong with the Redis at `url` that no waiting mends: a predicate."""


def checked(options: ClusterOptions) -> ClusterOptions:
    """Return the options with the time to drain that the services have. Raises UsageError, which names the flag."""
    roles = ["router", *dict.fromkeys(role for _, role in options.workers)]
    settings = {role: _check(options, role) for role in roles}
    return replace(options, drain_seconds=settings["router"].drain_seconds)


def redis_refusal(url: str) -> str | None:
    """Return what is wrong with the Redis at `url` that no waiting mends, a predicate without the password, or None."""
    return _command("router").redis_refusal(url)


def _command(role: str) -> Checkable:
    return service(role)  # type: ignore[return-value]  # which all of our services' commands are


def _check(options: ClusterOptions, role: str) -> Settings:
    try:
        return _command(role).check(command_line(options, role, role, 0))
    except click.UsageError as error:
        msg = error.message.replace("--tp ", f"{RANKS.get(role, '--tp')} ")
        raise click.UsageError(msg) from None
