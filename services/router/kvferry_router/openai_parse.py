"""From the bytes of a body to a checked request."""

import re
from typing import Any, TypeVar

import msgspec
import orjson
from msgspec import inspect

from kvferry_router.bad_request import BadRequest
from kvferry_router.openai_types import MAX_STOP_CHARACTERS, MAX_STOPS, UNSUPPORTED, Common

T = TypeVar("T", bound=Common)

_PATH = re.compile(r"^(?P<message>.*) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_ENUM = re.compile(r"^Invalid enum value (?P<value>.*) - at `\$\.(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


def parse(body: bytes, kind: type[T]) -> T:
    """Validate `body` as `kind`. Raises BadRequest that names the field, what was expected and what came."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(_unreadable(body, error)) from None
    if not isinstance(value, dict):
        msg = f"the body must be a JSON object, got {_name(value)}"
        raise BadRequest(msg)
    _refuse_unsupported(value, kind)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None


def stops(request: Common) -> list[str]:
    """Return the stop strings. Raises BadRequest."""
    given = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(given) > MAX_STOPS:
        msg = f"stop takes at most {MAX_STOPS} strings, got {len(given)}"
        raise BadRequest(msg, "stop")
    for stop in given:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            msg = f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, got one of {len(stop)}"
            raise BadRequest(msg, "stop")
    return given


def _refuse_unsupported(value: dict[str, Any], kind: type[Common]) -> None:
    for field in (value.keys() & UNSUPPORTED.keys()) - set(kind.__struct_fields__):
        # `True == 1` in Python, but not in JSON.
        got = value[field]
        if not any(
            got == neutral and isinstance(got, bool) == isinstance(neutral, bool) for neutral in UNSUPPORTED[field]
        ):
            msg = f"{field} is not supported by this server (got {_shown(got)}); leave it out"
            raise BadRequest(msg, field)


def _shown(value: object) -> str:
    try:
        return orjson.dumps(value)[:80].decode(errors="replace")
    except orjson.JSONEncodeError:
        # Read, but nested more deeply than orjson writes.
        return _name(value)


def _unreadable(body: bytes, error: orjson.JSONDecodeError) -> str:
    # What orjson says of bytes that are no UTF-8 has no place in it.
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"the body is not UTF-8: byte 0x{body[wrong.start]:02x} at offset {wrong.start} ({wrong.reason})"
    return f"the body is not valid JSON: {error}"


def _explain(text: str, kind: type[Common]) -> BadRequest:
    """Turn msgspec's "Expected `int`, got `str` - at `$.max_tokens`" into our words."""
    if missing := _MISSING.search(text):
        return BadRequest(f"{missing[1]} is missing", missing[1])
    if match := _ENUM.match(text):
        allowed = ", ".join(_allowed(kind, match["path"]))
        return BadRequest(f"{match['path']}: expected one of {allowed}, got {match['value']}", match["path"])
    if match := _PATH.match(text):
        return BadRequest(f"{match['path'] or 'body'}: {match['message'].lower()}", match["path"] or "")
    return BadRequest(text)


def _allowed(kind: type[Common], path: str) -> list[str]:
    """Return the literals that may stand at `path`."""
    types: list[inspect.Type] = [inspect.type_info(kind)]
    for part in re.findall(r"\w+", path):
        types = [inner for outer in types for inner in _inside(outer, part)]
    return [str(value) for each in types if isinstance(each, inspect.LiteralType) for value in each.values]


def _inside(outer: inspect.Type, part: str) -> list[inspect.Type]:
    match outer:
        case inspect.StructType():
            found = [field.type for field in outer.fields if field.encode_name == part]
        case inspect.ListType():
            found = [outer.item_type]
        case _:
            found = []
    return [each for one in found for each in (one.types if isinstance(one, inspect.UnionType) else (one,))]


def _name(value: object) -> str:
    return {"NoneType": "null", "list": "an array", "str": "a string", "bool": "a boolean"}.get(
        type(value).__name__, "a number"
    )
