"""Reading single fields of a config.json, whose names have changed over the years."""

from typing import Any


def first(raw: dict[str, Any], *names: str, default: object) -> Any:  # noqa: ANN401 - JSON values
    """Value of the first of `names` that is present and not null."""
    return next((raw[name] for name in names if raw.get(name) is not None), default)


def only(raw: dict[str, Any], name: str, *supported: object) -> None:
    """Raise ValueError when `name` is present, not null, and none of `supported`."""
    value = raw.get(name)
    if value is not None and value not in supported:
        msg = f"{name} {value!r} is not supported; supported is {', '.join(map(str, supported))}"
        raise ValueError(msg)
