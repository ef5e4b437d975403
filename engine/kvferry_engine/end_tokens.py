"""The tokens that routers name as the ends of answers, read from the same model folder."""

from pathlib import Path

import orjson
from kvferry_proto.ends import end_token_ids, token_name

from kvferry_engine.config import read_json


def end_tokens(folder: Path, tokenizer: str) -> frozenset[int]:
    """Return them; `tokenizer`: the text of tokenizer.json. Raises ValueError or ModelError."""
    config = read_json(folder / "config.json")
    sources = [read_json(folder / "generation_config.json", {}), config.get("text_config") or config]
    name = token_name(read_json(folder / "tokenizer_config.json", {}).get("eos_token"))
    return end_token_ids(sources, _token_id(orjson.loads(tokenizer), name))


def _token_id(tokenizer: dict[str, object], name: str) -> int | None:
    match tokenizer:
        case {"added_tokens": list(added)} if ids := [each["id"] for each in added if each.get("content") == name]:
            return int(ids[0])
        case {"model": {"vocab": dict(vocabulary)}}:
            return vocabulary.get(name)
    return None
