"""What strings of a format look like, for jsonschema: it knows some formats only with packages of others."""

import datetime
import re

from jsonschema import FormatChecker

_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.IGNORECASE | re.ASCII
)
_YEAR = re.compile(r"\d{4}", re.ASCII)
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOSTNAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", re.IGNORECASE | re.ASCII)
_CLOCK = r"T(?=\d)(\d+H)?(\d+M)?(\d+S)?"
_DURATION = re.compile(rf"P((?=\d)(\d+Y)?(\d+M)?(\d+D)?({_CLOCK})?|{_CLOCK}|\d+W)", re.ASCII)

FORMATS = FormatChecker(("email", "ipv4", "ipv6", "uuid"))
"""Checks RFC 3339's dates, times and durations, host names, addresses and uuids."""


def _check(name, holds):
    """Formats say nothing about what is no string."""
    FORMATS.checks(name)(lambda value: not isinstance(value, str) or bool(holds(value)))


def _is_date(text):
    """Takes 29 February for a date in every year: a grammar has no calendar."""
    try:
        datetime.date.fromisoformat(f"2000{text[4:]}")
    except ValueError:
        return False
    return _YEAR.fullmatch(text[:4]) is not None


def _is_date_time(text):
    date, time = text[:10], text[11:]
    return text[10:11] in ("T", "t", " ") and FORMATS.conforms(date, "date") and FORMATS.conforms(time, "time")


_check("date", _is_date)
_check("time", _TIME.fullmatch)
_check("hostname", _HOSTNAME.fullmatch)
_check("duration", _DURATION.fullmatch)
_check("date-time", _is_date_time)
