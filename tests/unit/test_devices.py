"""--device: what it names, and that no part of a step is left on another device than the model's."""

import numpy as np
import pytest
import torch
from kvferry_engine import devices
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.feasible import check_worker
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models import Model
from kvferry_engine.weights import load_model
from kvferry_engine.worker_settings import WorkerSettings
from kvferry_node.errors import SettingsError
from kvferry_node.options import load_settings
from random_models import build_random
from torch._subclasses.fake_tensor import FakeTensorMode


def with_gpus(monkeypatch, count) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_the_processor_needs_nothing(monkeypatch) -> None:
    with_gpus(monkeypatch, 0)
    assert devices.resolve("cpu", 3) == ("cpu",) * 3
    assert devices.resolve("auto", 2) == ("cpu",) * 2


def test_gpus_are_taken_from_the_one_that_is_named(monkeypatch) -> None:
    with_gpus(monkeypatch, 4)
    assert devices.resolve("cuda") == ("cuda:0",)
    assert devices.resolve("auto", 2) == ("cuda:0", "cuda:1")
    assert devices.resolve("cuda:2", 2) == ("cuda:2", "cuda:3")


@pytest.mark.parametrize(("wanted", "ranks", "what"), [("cuda:4", 1, "GPU 4 is needed"), ("cuda:3", 2, "GPUs 3 to 4")])
def test_a_gpu_that_is_not_there_is_named(monkeypatch, wanted, ranks, what) -> None:
    with_gpus(monkeypatch, 4)
    with pytest.raises(SettingsError, match=f"{what}.*torch finds 4"):
        devices.resolve(wanted, ranks)


def test_a_torch_without_cuda_is_named_before_anything_starts(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    settings = load_settings(WorkerSettings, "decoder", {"model": str(tmp_path), "device": "cuda"}, {}, None)
    with pytest.raises(SettingsError, match=r"^--device cuda: GPU 0 is needed, and torch .* without CUDA: install"):
        check_worker(settings)


def test_more_pages_than_the_machine_has_memory_for_are_refused(tmp_path) -> None:
    build_random(tmp_path, "llama")
    given = {"model": str(tmp_path), "kv_memory": "1000TiB"}
    settings = load_settings(WorkerSettings, "decoder", given, {}, None)
    with pytest.raises(SettingsError, match=r"^--kv-memory: .* for 1 ranks are more than this machine has"):
        check_worker(settings)


@pytest.mark.parametrize("given", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cuda:0,1"])
def test_other_names_are_refused(given) -> None:
    with pytest.raises(SettingsError, match="cpu, cuda, cuda:N or auto"):
        load_settings(WorkerSettings, "decoder", {"model": "/m", "device": given}, {}, None)


def on_meta(folder) -> tuple[Model, KVPool]:
    """A model and its pool on torch's device without memory, beside which host tensors are as wrong as beside a GPU."""
    model = load_model(folder, "float32", device="meta")
    pool = KVPool(model.kv_layout(8), 32)
    pool._tensor = pool.tensor.to("meta")
    return model, pool


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_step_computes_on_one_device(tmp_path, kind) -> None:
    build_random(tmp_path, kind)
    model, pool = on_meta(tmp_path)
    slices = [
        SequenceSlice([5], 20, range(3)),
        SequenceSlice([6], 9, [4, 5]),
        SequenceSlice(np.arange(12), 0, [6, 7]),
        SequenceSlice([1, 2, 3], 10, [8, 9]),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = ForwardBatch.build(slices, page_size=8, device="meta")
        logits = model.forward(batch, pool)
    assert logits is not None
    assert (logits.device.type, logits.shape) == ("meta", (4, model.config.vocab_size))
