"""What an answer must look like: a schema, a regular expression or a grammar that a decoder holds it to."""

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import orjson

MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_CHOICES = 1024
WHITESPACE = r"[ \t\n\r]{0,24}"
"""Between the tokens of JSON: room for indentation, and none to ramble until max_tokens."""

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class GrammarKind(enum.StrEnum):
    """How a grammar's text is to be read."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """llguidance's dialect of Lark."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The language of an answer's text. Whether it can be compiled turns out on the decoder."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that a schema describes; raises TypeError for what is no JSON."""
        text = schema if isinstance(schema, str) else orjson.dumps(dict(schema)).decode()
        return cls(kind=GrammarKind.JSON_SCHEMA, text=text)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A whole text that `pattern` matches, in the syntax of Rust's regex crate."""
        return cls(kind=GrammarKind.REGEX, text=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """One of `texts`."""
        return cls.regex("|".join(f"({escaped(text)})" for text in texts))

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """What a context-free grammar derives from its rule `start`."""
        return cls(kind=GrammarKind.LARK, text=text)


def escaped(text: str) -> str:
    """Return the regular expression that matches `text` alone."""
    return _SPECIAL.sub(r"\\\g<0>", text)
