"""Where a GPU's KV pages lie."""

import pytest
from kvferry_engine import kv_place
from kvferry_engine.kv_place import in_gpu
from kvferry_engine.worker_settings import WorkerSettings
from kvferry_node.errors import SettingsError


@pytest.mark.parametrize(
    ("device", "place", "possible", "there"),
    [
        ("cpu", "gpu", True, False),
        ("cuda:0", "auto", True, True),
        ("cuda:0", "auto", False, False),
        ("cuda:0", "host", True, False),
        ("cuda:0", "gpu", True, True),
    ],
)
def test_pages_lie_where_the_provider_takes_them(monkeypatch, device, place, possible, there) -> None:
    monkeypatch.setattr(kv_place, "takes_device_memory", lambda _provider, _host: possible)
    assert in_gpu(WorkerSettings(model="/m", kv_place=place), device) is there


def test_a_provider_that_cannot_is_named() -> None:
    with pytest.raises(SettingsError, match="--kv-place gpu: provider tcp does not take"):
        in_gpu(WorkerSettings(model="/m", kv_place="gpu", provider="tcp"), "cuda:0")
