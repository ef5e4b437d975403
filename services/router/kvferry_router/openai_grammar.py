"""From the fields that ask for a shape of the answer to the grammar that decoders hold it to."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import orjson
from kvferry_proto.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS, Grammar

from kvferry_router.bad_request import BadRequest
from kvferry_router.openai_types import ChatRequest, Common, ResponseFormat
from kvferry_router.tool_choice import tool_grammar

_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def grammar_of(request: Common, special: Collection[str] = ()) -> tuple[str, Grammar | None]:
    """Return the grammar of the answer, None if it is free, after the field that asks for it. Raises BadRequest.

    `special`: the tags of tool calls that are special tokens.
    """
    asked = [(name, value) for name in _FIELDS if (value := getattr(request, name)) is not None]
    found = [(name, grammar) for name, value in asked if (grammar := _grammar(name, value)) is not None]
    if isinstance(request, ChatRequest) and (called := tool_grammar(request, special)) is not None:
        found.append(("tool_choice", check_size(called, "tools")))
    if len(found) > 1:
        msg = f"{' and '.join(name for name, _ in found)} exclude each other: an answer has one shape"
        raise BadRequest(msg, found[1][0])
    field, grammar = found[0] if found else ("", None)
    return "tools" if field == "tool_choice" else field, grammar


def check_size(grammar: Grammar, field: str) -> Grammar:
    """Return `grammar` if decoders take one as long. Raises BadRequest."""
    if not 1 <= len(grammar.text) <= MAX_GRAMMAR_CHARACTERS:
        msg = f"{field}: a grammar has 1 to {MAX_GRAMMAR_CHARACTERS} characters, this one {len(grammar.text)}"
        raise BadRequest(msg, field)
    return grammar


def _grammar(field: str, value: Any) -> Grammar | None:  # noqa: ANN401  # the fields differ in type
    match field:
        case "response_format":
            return _response_format(value)
        case "structured_outputs":
            return _structured(msgspec.structs.asdict(value))
        case _:
            return _guided(field, field.removeprefix("guided_"), value)


def _structured(given: Mapping[str, Any]) -> Grammar | None:
    """vLLM's newer form: an object that holds one of them."""
    named = {name: value for name, value in given.items() if value not in (None, False)}
    if len(named) != 1:
        msg = f"structured_outputs: expected one of {', '.join(given)}, got {', '.join(named) or 'none'}"
        raise BadRequest(msg, "structured_outputs")
    [(kind, value)] = named.items()
    return _guided(f"structured_outputs.{kind}", kind, value)


def _guided(field: str, kind: str, value: Any) -> Grammar:  # noqa: ANN401  # as above
    match kind:
        case "json_object":
            return Grammar.json_object()
        case "json":
            return json_schema(value, field)
        case "regex":
            return check_size(Grammar.regex(value), field)
        case "choice":
            return _choice(value, field)
        case _:
            return check_size(Grammar.lark(value), field)


def _response_format(asked: ResponseFormat) -> Grammar | None:
    match asked.type:
        case "text":
            return None
        case "json_object":
            return Grammar.json_object()
    if asked.json_schema is None:
        msg = "response_format.json_schema is missing"
        raise BadRequest(msg, "response_format.json_schema")
    return json_schema(asked.json_schema.schema, "response_format.json_schema.schema")


def json_schema(schema: Mapping[str, Any] | str, field: str) -> Grammar:
    """Return the grammar of a schema, given as an object or as JSON. Raises BadRequest."""
    try:
        value = orjson.loads(schema) if isinstance(schema, str) else schema
        grammar = Grammar.json_schema(value) if isinstance(value, Mapping) else None
    except (orjson.JSONDecodeError, TypeError) as error:
        msg = f"{field} is no JSON schema: {error}"
        raise BadRequest(msg, field) from None
    if grammar is None:
        msg = f"{field} is no JSON schema: expected an object"
        raise BadRequest(msg, field)
    return check_size(grammar, field)


def _choice(texts: list[str], field: str) -> Grammar:
    if not 1 <= len(texts) <= MAX_CHOICES:
        msg = f"{field} takes 1 to {MAX_CHOICES} texts, got {len(texts)}"
        raise BadRequest(msg, field)
    return check_size(Grammar.choice(texts), field)
