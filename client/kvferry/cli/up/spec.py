"""What a child process is, before it runs."""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


class Stage(enum.IntEnum):
    """When a child is stopped: lower ones first, so that nobody loses a peer that it still needs."""

    ROUTER = 0
    DECODER = 1
    PREFILLER = 2
    REDIS = 3


Probe = Callable[[], Awaitable[str | None]]
"""Says why a child can't serve yet, or None when it can."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A command line, and how to tell that it is ready."""

    name: str
    stage: Stage
    argv: list[str]
    probe: Probe
    env: dict[str, str] = field(default_factory=dict)
    """Added to our own environment."""
    grace: float
    """Seconds from SIGTERM to SIGKILL."""
