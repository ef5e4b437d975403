"""For tests: a model folder that a router can use, with a tiny tokenizer and no weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MODEL = "tiny"
END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'refuse me' %}{{ raise_exception('no such turn') }}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["Hello world, here is the answer to your question.", "one two three four five", "the quick brown fox"]


def make_model_folder(folder: Path) -> Path:
    """Write a byte-level tokenizer with a chat template and the configuration beside it; no weights."""
    folder = folder / MODEL
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special: list[str | AddedToken] = ["<|im_start|>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id(END)
    config = {"vocab_size": vocabulary, "max_position_embeddings": 256, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return folder
