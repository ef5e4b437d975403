"""Which tokens end an answer: one rule, for the router that asks and the decoder that gets ready for it."""

from collections.abc import Iterable, Mapping
from typing import Any


def end_token_ids(sources: Iterable[Mapping[str, Any]], named: int | None) -> frozenset[int]:
    """Return every `eos_token_id` of a model's settings, and the token that its tokenizer names, if there is one."""
    found = {named} if named is not None else set()
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def token_name(token: str | Mapping[str, Any] | None) -> str:
    """Return a special token as tokenizer_config.json has it: plain, or an object with its content."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else token or ""
