"""Structured logs: one line per event, with node, incarnation and role; JSON for machines, colours for people."""

import logging
import sys
import time
from typing import Any

import orjson
import structlog
from kvferry_proto.nodes import NodeRef
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger


def setup_logging(level: str, format: str, node: NodeRef | None = None, role: str = "") -> None:  # noqa: A002
    """Send structlog's events and those of the standard library to standard error, from `level` up.

    `format`: "json" or "console". Whatever is bound with structlog.contextvars (a request id) is part of every line.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Identity(node, role),
    ]
    structlog.configure(
        processors=[*shared, *_rendering(format)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(format)],
        )
    )
    # uvicorn and redis log through the standard library; their chatter below "warning" is not ours.
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)


def get_logger(**bound: object) -> FilteringBoundLogger:
    """Return a logger that adds `bound` to its lines."""
    logger: FilteringBoundLogger = structlog.get_logger(**bound)
    return logger


class Throttle:
    """Lets one event per key and period pass, so that a flood of one kind of trouble cannot drown the log."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._passed: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def passes(self, key: str) -> int | None:
        """Return how many events of `key` were held back since the last that passed, or None: hold this one back.

        Keys come from a small set of our own words, never from a peer.
        """
        now = time.monotonic()
        if now - self._passed.get(key, -self._seconds) < self._seconds:
            self._held[key] = self._held.get(key, 0) + 1
            return None
        self._passed[key] = now
        return self._held.pop(key, 0)


class _Identity:
    """Adds who speaks to every line."""

    def __init__(self, node: NodeRef | None, role: str) -> None:
        self._fields = {"role": role} if role else {}
        if node is not None:
            self._fields |= {"node": node.id, "incarnation": f"{node.incarnation:x}"}

    def __call__(self, _logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        return {**self._fields, **event}


def _rendering(format: str) -> list[Processor]:  # noqa: A002
    if format == "console":
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]


def _to_json(event: Any, **_options: object) -> str:  # noqa: ANN401  # whatever was logged
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode(errors="replace")
