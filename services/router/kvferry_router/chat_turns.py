"""The turns of a chat as templates take them, with tools and without.

A template that knows tools gets them, and the calls of earlier turns, as objects. For any other the tools are described
in a system turn, and calls and their results stand in the turns' text, as Hermes models have it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from kvferry_router.bad_request import BadRequest
from kvferry_router.openai_types import FunctionCall, Tool, Turn
from kvferry_router.tool_calls import CLOSE, OPEN

ROLES = ("system", "developer", "user", "assistant", "tool")
_INSTRUCTIONS = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{{tools}}
</tools>

For each function call, return a json object with function name and arguments within {OPEN}{CLOSE} XML tags:
{OPEN}
{{{{"name": <function-name>, "arguments": <args-json-object>}}}}
{CLOSE}"""

Json = dict[str, Any]


def template_turns(turns: Sequence[Turn], tools: Sequence[Tool], *, native: bool) -> list[Json]:
    """Return the messages for a template; `native`: whether it knows tools. Raises BadRequest."""
    made = [_turn(turn, f"messages[{index}]", native=native) for index, turn in enumerate(turns)]
    return made if native or not tools else _with_instructions(made, tools)


def template_tools(tools: Sequence[Tool]) -> list[Json]:
    """Return the tools as templates take them."""
    return [{"type": "function", "function": _without_none(tool.function)} for tool in tools]


def role_of(role: str, where: str) -> str:
    """Return the role as templates know it. Raises BadRequest."""
    if role not in ROLES:
        msg = f"{where}.role: expected one of {', '.join(ROLES)}, got {role[:40]!r}"
        raise BadRequest(msg, f"{where}.role")
    return "system" if role == "developer" else role


def _turn(turn: Turn, where: str, *, native: bool) -> Json:
    role = role_of(turn.role, where)
    if turn.tool_calls and role != "assistant":
        msg = f"{where}.tool_calls: only the assistant calls tools"
        raise BadRequest(msg, f"{where}.tool_calls")
    if role == "tool":
        return _result(turn, where, native=native)
    calls = [_call(call.function, where) for call in turn.tool_calls or []]
    if not calls:
        return {"role": role, "content": _content(turn, where)}
    text = "" if turn.content is None else _content(turn, where)
    if native:
        return {
            "role": role,
            "content": text,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
    written = [f"{OPEN}\n{orjson.dumps(call).decode()}\n{CLOSE}" for call in calls]
    return {"role": role, "content": "\n".join([text, *written] if text else written)}


def _result(turn: Turn, where: str, *, native: bool) -> Json:
    """What a tool gave back."""
    if not turn.tool_call_id:
        msg = f"{where}.tool_call_id is missing: which call does this answer?"
        raise BadRequest(msg, f"{where}.tool_call_id")
    content = _content(turn, where)
    if native:
        return {"role": "tool", "content": content, "tool_call_id": turn.tool_call_id}
    return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}


def _call(function: FunctionCall, where: str) -> Json:
    try:
        arguments = orjson.loads(function.arguments or "{}")
    except orjson.JSONDecodeError as error:
        msg = f"{where}.tool_calls: the arguments of {function.name!r} are no JSON: {error}"
        raise BadRequest(msg, f"{where}.tool_calls") from None
    call = {"name": function.name, "arguments": arguments}
    try:
        orjson.dumps(call)
    except TypeError:
        msg = f"{where}.tool_calls: the arguments of {function.name!r} are nested too deeply"
        raise BadRequest(msg, f"{where}.tool_calls") from None
    return call


def _content(turn: Turn, where: str) -> str:
    if isinstance(turn.content, str):
        return turn.content
    if turn.content is None:
        msg = f"{where}.content is missing"
        raise BadRequest(msg, f"{where}.content")
    for part in turn.content:
        if part.type != "text" or part.text is None:
            msg = f"{where}.content: only parts of type text are supported, got {part.type!r}"
            raise BadRequest(msg, f"{where}.content")
    return "".join(part.text or "" for part in turn.content)


def _with_instructions(turns: list[Json], tools: Sequence[Tool]) -> list[Json]:
    lines = "\n".join(orjson.dumps(tool).decode() for tool in template_tools(tools))
    text = _INSTRUCTIONS.format(tools=lines)
    if turns and turns[0]["role"] == "system":
        return [{"role": "system", "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _without_none(value: msgspec.Struct) -> Json:
    return {name: each for name, each in msgspec.to_builtins(value).items() if each is not None}
