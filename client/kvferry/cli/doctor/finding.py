"""What a check found."""

import enum

import msgspec


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    """kvferry runs, but something will be slow or missing."""
    FAIL = "fail"
    """kvferry cannot run like this."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    level: Level
    text: str
    advice: str = ""
    """What to do about it; "" where nothing needs doing."""


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name=name, level=Level.OK, text=text)


def warn(name: str, text: str, advice: str) -> Finding:
    """It works, but."""
    return Finding(name=name, level=Level.WARN, text=text, advice=advice)


def fail(name: str, text: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(name=name, level=Level.FAIL, text=text, advice=advice)
