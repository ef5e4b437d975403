"""Router and decoder find the same end tokens in a folder: the decoder gets ready for what the router will ask."""

import json

import pytest
from kvferry_engine.end_tokens import end_tokens
from kvferry_router.model_folder import load_model_text
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel


@pytest.mark.parametrize(
    ("config", "generation", "named", "ends"),
    [
        ({"eos_token_id": 1}, {}, None, {1}),
        ({"eos_token_id": 1}, {"eos_token_id": [2, 5]}, "<end>", {1, 2, 5, 3}),
        ({"text_config": {"eos_token_id": [4]}, "eos_token_id": 1}, {}, {"content": "<end>"}, {4, 3}),
        ({"eos_token_id": None}, {}, "word", {2}),
        ({}, {}, "unknown", set()),
        ({}, {}, None, set()),
    ],
    ids=range(6),
)
def test_both_sides_find_the_same(tmp_path, config, generation, named, ends):
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "word": 2}, "a"))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    encoded = json.loads(tokenizer.to_str()) | {"decoder": {"type": "Fuse"}}
    files = {"tokenizer": encoded, "config": config, "generation_config": generation}
    for name, value in (files | {"tokenizer_config": {"eos_token": named}}).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert set(load_model_text(tmp_path).stop_token_ids) == ends
    assert end_tokens(tmp_path, json.dumps(encoded)) == ends
