"""Tool calls in an answer's text, Hermes style: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import secrets
from typing import Any

import msgspec
import orjson

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
SURE = "<tool"
"""So much of a tag is taken for one, where an answer may also be text."""


class ToolCall(msgspec.Struct, frozen=True):
    """One call, complete."""

    index: int
    name: str
    arguments: str
    """JSON text."""


def as_openai(call: ToolCall, *, streamed: bool) -> dict[str, Any]:
    """A call in OpenAI's words; its id is drawn here."""
    body = {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    return {"index": call.index} | body if streamed else body


class ToolCallParser:
    """Splits text that comes in pieces into plain text and calls. A tag may be cut anywhere.

    What stands between the tags and is no call is given back as plain text, tags and all. A call that the answer's end
    cuts off is dropped: a half-written one is no text for a reader, and no call.
    """

    def __init__(self, *, must_call: bool = False) -> None:
        """`must_call`: the answer is calls and nothing else, so that even a "<" begins one."""
        self._least = 1 if must_call else len(SURE)
        self._held = ""
        self._inside = False
        self.count = 0
        """Calls found."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the plain text that became certain with `text`, and the calls that it completed."""
        self._held += text
        plain, calls = [], []
        while (at := self._held.find(CLOSE if self._inside else OPEN)) >= 0:
            if not self._inside:
                plain.append(self._held[:at].rstrip())
                self._held = self._held[at + len(OPEN) :]
            elif (call := self._call(self._held[:at])) is not None:
                calls.append(call)
                self._held = self._held[at + len(CLOSE) :]
            else:
                plain.append(OPEN + self._held[: at + len(CLOSE)])
                self._held = self._held[at + len(CLOSE) :]
            self._inside = not self._inside
        if not self._inside:
            plain.append(self._certain())
        return self._trimmed("".join(plain)), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The answer is over: return what was held back. A last call may lack its closing tag."""
        rest, self._held = self._held, ""
        if not self._inside:
            return self._trimmed(_without_half_a_tag(rest, self._least)), []
        self._inside = False
        call = self._call(rest)
        return "", [call] if call is not None else []

    def _certain(self) -> str:
        """Take off all that can't be the beginning of a tag."""
        keep = next((n for n in range(min(len(OPEN) - 1, len(self._held)), 0, -1) if self._held.endswith(OPEN[:n])), 0)
        # Line breaks before a call belong to it.
        keep += len(self._held[: len(self._held) - keep]) - len(self._held[: len(self._held) - keep].rstrip())
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def _trimmed(self, text: str) -> str:
        """Between calls and after them there is nothing but line breaks."""
        return "" if self.count and not text.strip() else text

    def _call(self, text: str) -> ToolCall | None:
        try:
            match orjson.loads(text):
                case {"name": str(name), "arguments": dict(arguments)}:
                    call = ToolCall(self.count, name, orjson.dumps(arguments).decode())
                case _:
                    return None
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # the latter: nested more deeply than it writes
            return None
        self.count += 1
        return call


def _without_half_a_tag(text: str, least: int) -> str:
    """Take off what is the beginning of a tag, of `least` characters or more."""
    half = next((size for size in range(len(OPEN) - 1, least - 1, -1) if text.endswith(OPEN[:size])), 0)
    return text[: len(text) - half].rstrip() if half else text
