"""Which tools an answer may call, and the grammar of an answer that must call one."""

from collections.abc import Collection
from typing import Any

import msgspec
import orjson
from kvferry_proto.grammar import WHITESPACE, Grammar

from kvferry_router.bad_request import BadRequest
from kvferry_router.openai_types import ChatRequest, NamedChoice, Tool
from kvferry_router.tool_calls import CLOSE, OPEN

MOST_CALLS = 8
"""Calls of one answer that must call, where it may call several. A small model never stops by itself."""


def tools_of(request: ChatRequest) -> list[Tool]:
    """Return the tools that the model is told of: none if it may call none. Raises BadRequest."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        msg = "tools: two functions have the same name"
        raise BadRequest(msg, "tools")
    if choice == "required" and not tools:
        msg = "tool_choice needs tools"
        raise BadRequest(msg, "tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        msg = f"tool_choice: no tool is named {choice.function.name!r}"
        raise BadRequest(msg, "tool_choice")
    _check_depth(tools)
    return [] if choice == "none" else tools


def _check_depth(tools: list[Tool]) -> None:
    """Raise BadRequest for tools that were read, but are nested more deeply than orjson writes."""
    try:
        orjson.dumps(msgspec.to_builtins(tools))
    except (TypeError, RecursionError):
        msg = "tools: the parameters of a function are nested too deeply"
        raise BadRequest(msg, "tools") from None


def tool_grammar(request: ChatRequest, special: Collection[str] = ()) -> Grammar | None:
    """Return the grammar of an answer that must call a tool; None if it need not. Raises BadRequest.

    `special`: the tags that are special tokens.
    """
    choice, tools = request.tool_choice, tools_of(request)
    if isinstance(choice, NamedChoice):
        return _calls([tool for tool in tools if tool.function.name == choice.function.name], special)
    if choice == "required":
        return _calls(tools, special, several=request.parallel_tool_calls is not False)
    return None


def _calls(tools: list[Tool], special: Collection[str], *, several: bool = False) -> Grammar:
    """Each tool has a rule of its own: its schema is a document of its own, with references into itself."""
    # Text matches no special token; by its name in angle brackets a rule asks for the token itself.
    opened, closed = (tag if tag in special else _json(tag) for tag in (OPEN, CLOSE))
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    more = f'("\\n" call){{0,{MOST_CALLS - 1}}}' if several else ""
    rules = [f"start: call {more}", f"call: {names}"]
    tail = _json("}\n")
    for number, tool in enumerate(tools):
        head = _json(f'\n{{"name": {_json(tool.function.name)}, "arguments": ')
        rules.append(f"call_{number}: {opened} {head} arguments_{number} {tail} {closed}")
        rules.append(f"arguments_{number}: %json {_json(_parameters(tool))}")
    return Grammar.lark("\n".join(rules))


def _parameters(tool: Tool) -> dict[str, Any]:
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, "type": "object", **(tool.function.parameters or {})}


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
