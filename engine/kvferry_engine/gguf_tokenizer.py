"""The byte-level BPE tokenizer in a GGUF file's metadata, written as tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvferry_engine.errors import ModelError

CONTROL, USER_DEFINED = 3, 4
"""Token types of GGUF that are matched in the text before any other rule."""


class Metadata(Protocol):
    """Looks up GGUF metadata by key."""

    def __getitem__(self, key: str) -> Any: ...  # noqa: ANN401 - GGUF values are of any type

    def get(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - GGUF values are of any type
        """Value of `key`, or `default` where it is absent."""


def write_tokenizer(fields: Metadata, folder: Path) -> None:
    """Write the tokenizer of `fields` into `folder`; raises ModelError for a kind that is not known."""
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    config = json.dumps(_tokenizer_config(fields), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def build_tokenizer(fields: Metadata) -> Tokenizer:
    """Build the tokenizer that `fields` describe; raises ModelError unless it is BPE with the "smollm" rules."""
    kind, rules = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if (kind, rules) != ("gpt2", "smollm"):
        msg = f"a GGUF tokenizer of model {kind!r} with pre-tokenizer {rules!r} cannot be converted"
        raise ModelError(msg)
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # "smollm": every digit stands alone, then the byte-level rules of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([_added(tokens[index]) for index, of in enumerate(types) if of == CONTROL])
    tokenizer.add_tokens([_added(tokens[index]) for index, of in enumerate(types) if of == USER_DEFINED])
    return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _tokenizer_config(fields: Metadata) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": bool(fields.get("tokenizer.ggml.add_space_prefix", False)),
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        "chat_template": fields.get("tokenizer.chat_template"),
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    }
