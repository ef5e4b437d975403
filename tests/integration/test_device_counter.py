"""A GPU's layer counter over a stand-in for its stream: what it adds to the word is what the fabric's schedules see."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from kvferry_engine import device_counter
from kvferry_engine.device_counter import DeviceCounter
from kvferry_fabric import TransferEngine


@pytest.fixture
def fences(monkeypatch) -> list[tuple[int, ...]]:
    """Fences that the stream was given; each must come before the addition that it is for."""
    given: list[tuple[int, ...]] = []

    class Mapped:
        pointer = 1 << 40

        def __init__(self, buffer, _device) -> None:
            self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)

        def close(self) -> None:
            given.append(())

    def fence(*arguments):
        given.append((*arguments, counters[0].counter.value if counters else 0))
        return (0,)

    counters: list[DeviceCounter] = []
    monkeypatch.setattr(device_counter, "MappedMemory", Mapped)
    monkeypatch.setattr(device_counter, "current", contextlib.nullcontext)
    monkeypatch.setattr(device_counter, "load", lambda: SimpleNamespace(cuStreamWriteValue64=fence))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(DeviceCounter, "watched", counters.append, raising=False)
    return given


def test_every_bump_is_a_fence_and_one_more(fences) -> None:
    with TransferEngine("tcp", incarnation=1) as engine:
        counter = DeviceCounter(engine, "cuda:0")
        DeviceCounter.watched(counter)
        for _ in range(3):
            counter.bump()
        assert counter.counter.value == 3
        beside = (1 << 40) + 128
        assert fences == [(5, beside, 1, 0, before) for before in range(3)]
    counter.close()
