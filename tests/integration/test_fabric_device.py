"""The fabric beside a GPU, as far as it goes without one: counters that move silently, and who takes GPU memory."""

import fabric_rig as rig
import numpy as np
import pytest
from kvferry_fabric import DeviceRange, EventKind, FabricError, TransferEngine, takes_device_memory


@pytest.fixture
def words() -> np.ndarray:
    """As a GPU's counter: memory of ours that moves without a call."""
    return np.zeros(8, np.uint64)


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_layers_are_sent_as_a_counter_moves_that_wakes_nobody(provider, words) -> None:
    pair = rig.Pair(provider)
    try:
        counter = pair.sender.new_counter(memoryview(words[2:3]).cast("B"))
        source, target = pair.permuted(10)
        pair.receiver.expect(1, 1, 10 * pair.layers)
        pair.sender.schedule_layers(pair.chunk(source, target, counter=counter))
        for layer in range(pair.layers):
            assert pair.receiver.arrived(1) == 10 * layer
            words[2] += 1
            rig.until(lambda n=10 * (layer + 1): pair.receiver.arrived(1) == n, "the layer's pages")
        assert counter.value == pair.layers
        assert rig.end_of(pair.sender).kind is EventKind.DONE
        np.testing.assert_array_equal(pair.target, pair.expected(source, target))
        counter.close()
    finally:
        pair.close()


def test_a_counter_goes_on_from_what_its_word_holds(words) -> None:
    with TransferEngine("tcp", incarnation=1) as engine:
        words[0] = 41
        counter = engine.new_counter(memoryview(words[:1]).cast("B"))
        counter.bump()
        assert (counter.value, int(words[0])) == (42, 42)


@pytest.mark.parametrize("length", [4, 7])
def test_a_word_that_is_too_short_is_refused(words, length) -> None:
    with TransferEngine("tcp", incarnation=1) as engine, pytest.raises(ValueError, match="too small"):
        engine.new_counter(memoryview(words).cast("B")[:length])


def test_a_word_that_is_not_aligned_is_refused(words) -> None:
    with TransferEngine("tcp", incarnation=1) as engine:
        with pytest.raises(FabricError, match="aligned to its 8 bytes"):
            engine.new_counter(memoryview(words).cast("B")[4:12])
        assert engine.stats().counters == 0


@pytest.mark.parametrize("provider", ["tcp", "net", "shm", "local"])
def test_providers_that_read_host_memory_alone_say_so(provider) -> None:
    assert not takes_device_memory(provider)
    if provider != "local":
        with pytest.raises(FabricError, match=f"'{provider}' does not take the memory of GPUs"):
            TransferEngine(provider, incarnation=1, device_memory=True)


def test_an_engine_that_was_not_opened_for_it_refuses_a_gpus_memory() -> None:
    with TransferEngine("tcp", incarnation=1) as engine:
        with pytest.raises(FabricError, match="not opened for it"):
            engine.register(DeviceRange(pointer=1 << 40, length=1 << 21, device=0))
        assert engine.stats().regions == 0
