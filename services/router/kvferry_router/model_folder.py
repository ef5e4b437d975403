"""What the router reads from a model folder: tokenizer, chat template, end tokens, limits. Never the weights."""

from pathlib import Path
from typing import Any

import msgspec
import orjson
from kvferry_proto.ends import end_token_ids, token_name
from tokenizers import Tokenizer as Encoder

from kvferry_router.chat_template import ChatTemplate
from kvferry_router.tokenizer import Tokenizer


class ModelFolderError(ValueError):
    """A folder that can't be served from; the text names the file and what is wrong with it."""


class ModelText(msgspec.Struct, frozen=True, kw_only=True):
    """The text side of a model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_token_ids: list[int]
    """Tokens that end an answer."""
    max_context: int
    """Tokens of prompt and answer together, as the model was trained for; 0 where the folder does not say."""


def load_model_text(folder: Path) -> ModelText:
    """Read `folder`. Raises ModelFolderError, ChatTemplateError."""
    config = _json(folder / "config.json", required=True)
    tokenizer_config = _json(folder / "tokenizer_config.json")
    encoder = _encoder(folder / "tokenizer.json")
    text = config.get("text_config") or config
    vocabulary = max(int(text.get("vocab_size") or 0), encoder.get_vocab_size(with_added_tokens=True))
    return ModelText(
        tokenizer=Tokenizer(encoder, vocabulary),
        template=_template(folder, tokenizer_config),
        stop_token_ids=_stop_token_ids(folder, text, tokenizer_config, encoder),
        max_context=int(text.get("max_position_embeddings") or 0),
    )


def _encoder(path: Path) -> Encoder:
    if not path.is_file():
        msg = f"{path} does not exist: the model folder must hold a tokenizer.json"
        raise ModelFolderError(msg)
    try:
        encoder = Encoder.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every unreadable file
        msg = f"{path} is not a tokenizer: {error}"
        raise ModelFolderError(msg) from error
    # Some folders carry the padding and truncation of a training run, which would cut prompts silently.
    encoder.no_padding()
    encoder.no_truncation()
    return encoder


def _template(folder: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text() if path.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not source:
        return None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return ChatTemplate(source, {name: token_name(tokenizer_config.get(name)) for name in names})


def _stop_token_ids(
    folder: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], encoder: Encoder
) -> list[int]:
    named = encoder.token_to_id(token_name(tokenizer_config.get("eos_token")))
    return sorted(end_token_ids([_json(folder / "generation_config.json"), config], named))


def _json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            msg = f"{path} does not exist: is {path.parent} a model folder?"
            raise ModelFolderError(msg)
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        msg = f"{path} is not JSON: {error}"
        raise ModelFolderError(msg) from error
    if not isinstance(value, dict):
        msg = f"{path} holds a {type(value).__name__}, expected an object"
        raise ModelFolderError(msg)
    return value
