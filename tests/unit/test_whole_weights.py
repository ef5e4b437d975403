"""Weights that a download left cut short, or not there at all, are named before anything starts."""

import pytest
from kvferry.cli.doctor.finding import Level
from kvferry.cli.doctor.model import model
from kvferry_engine.feasible import check_worker
from kvferry_engine.identity import INDEX, SINGLE
from kvferry_engine.worker_settings import WorkerSettings
from kvferry_node.errors import SettingsError
from kvferry_node.options import load_settings
from random_models import build_random


@pytest.fixture
def folder(tmp_path):
    build_random(tmp_path, "llama")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def said(folder):
    """What a node says, which is what doctor says too."""
    settings = load_settings(WorkerSettings, "decoder", {"model": str(folder)}, {}, None)
    with pytest.raises(SettingsError) as refused:
        check_worker(settings)
    finding = model(folder)
    assert finding.level is Level.FAIL
    assert str(refused.value) == f"--model: {finding.text}"
    return finding.text


def test_whole_weights_are_well(folder):
    check_worker(load_settings(WorkerSettings, "decoder", {"model": str(folder)}, {}, None))
    assert model(folder).level is not Level.FAIL


@pytest.mark.parametrize("cut", [0, 5, 8, 300, -1])
def test_a_file_that_is_cut_short_is_named_with_what_it_has_and_should_have(folder, cut):
    path = folder / SINGLE
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    header_end = 8 + int.from_bytes(whole[:8], "little")
    wanted = "more than 8" if cut in (0, 5) else f"more than {header_end}" if cut > 0 else len(whole)
    assert said(folder) == f"{path} has {len(whole[:cut])} bytes and should have {wanted}"


def test_a_file_with_more_than_its_header_tells_of_is_named(folder):
    path = folder / SINGLE
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"more")
    assert said(folder) == f"{path} has {size + 4} bytes and should have {size}"


def test_a_shard_that_is_not_there_is_named(folder):
    (folder / SINGLE).rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(str({"weight_map": shards}).replace("'", '"'))
    settings = load_settings(WorkerSettings, "decoder", {"model": str(folder)}, {}, None)
    with pytest.raises(SettingsError, match=r"^--model: .* lacks model-00002-of-00002.safetensors, which its index"):
        check_worker(settings)
    assert "lacks model-00002-of-00002.safetensors" in model(folder).text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "is a Git LFS pointer"),
        (b"<!DOCTYPE html><html>Not found</html>", "is not a safetensors file: no header"),
        ((2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
        ((14).to_bytes(8, "little") + b'{"a": {"b":1}}', "is not a safetensors file: 'data_offsets'"),
    ],
)
def test_what_is_no_weight_file_is_named(folder, content, words):
    (folder / SINGLE).write_bytes(content)
    assert words in said(folder)
