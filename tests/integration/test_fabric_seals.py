"""An end means that nothing of the transfer can land any more, though most writes are not acknowledged one by one."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import fabric_rig as rig
import numpy as np
import pytest
from kvferry_fabric import ChunkSchedule, EventKind, Transfer, TransferEngine, runs

LAYERS, PAGES, PAGE = 4, 512, 4096
SEALED = {"tcp", "net", "shm"}
"""Providers that keep writes in order, so that one confirmation seals a turn."""


@pytest.fixture(params=rig.PROVIDERS)
def pair(request: pytest.FixtureRequest) -> Iterator["rig.Pair"]:
    made = rig.Pair(request.param, LAYERS, PAGES, PAGE, gather=1)
    yield made
    made.close()


def landed(pair: "rig.Pair") -> int:
    """Pages of the receiver that have changed."""
    return int((pair.target != 0xA5).any(axis=2).sum())


def stays(pair: "rig.Pair", seconds: float = 0.03) -> None:
    """Nothing lands in this time."""
    before = pair.target.copy()
    time.sleep(seconds)
    np.testing.assert_array_equal(pair.target, before)


def test_nothing_lands_after_a_cancel_was_confirmed_and_all_that_was_posted_has(pair) -> None:
    source, target = pair.permuted(PAGES)
    kinds = set()
    for attempt in range(30):
        pair.target[:] = 0xA5
        goal = pair.sender.stats().pages + int(pair.random.integers(0, 400))
        transfer = pair.sender.schedule_layers(pair.chunk(source, target, counter=None))
        rig.until(lambda goal=goal: pair.sender.stats().pages >= goal, "some pages")
        transfer.cancel()
        ended = rig.end_of(pair.sender)
        kinds.add(ended.kind)
        assert landed(pair) == ended.pages, attempt
        stays(pair, 0.005)
    assert EventKind.CANCELLED in kinds


@pytest.mark.parametrize("nth", [2, 3, 31, 64, 65, 200])
def test_what_was_posted_before_a_refused_write_has_landed_when_the_failure_is_told(pair, nth) -> None:
    source, target = pair.permuted(PAGES)
    pair.sender.fault("fail", nth)
    pair.sender.schedule_layers(pair.chunk(source, target, counter=None))
    failed = rig.end_of(pair.sender)
    assert (failed.kind, failed.error, failed.pages) == (EventKind.FAILED, errno.EIO, nth - 1)
    assert landed(pair) == nth - 1
    stays(pair)
    assert pair.receiver.stats().stale_immediates == nth - 1, "a flush must carry no immediate"


def test_every_page_is_counted_once_however_turns_fall(pair) -> None:
    for generation, count in enumerate([1, 2, 63, 64, 65, 129, 512]):
        pair.target[:] = 0xA5
        source, target = pair.permuted(count)
        pair.receiver.expect(1, generation, count * LAYERS)
        pair.sender.schedule_layers(pair.chunk(source, target, generation=generation, counter=None))
        done = rig.end_of(pair.sender)
        assert (done.kind, done.writes) == (EventKind.DONE, count * LAYERS)
        rig.take(pair.receiver, {EventKind.ARRIVED})
        np.testing.assert_array_equal(pair.target, pair.expected(source, target))
        assert pair.receiver.disarm(1, generation)


def test_a_small_transfer_does_not_wait_for_a_large_one(pair) -> None:
    source, target = pair.permuted(PAGES)
    rounds = {"layers": 64, "source_layer_stride": 0, "destination_layer_stride": 0, "slot": 2}
    large = pair.sender.schedule_layers(pair.chunk(source, target, **rounds))
    pair.counter.bump()
    rig.until(lambda: pair.sender.stats().pages == PAGES, "the large transfer's first pages")
    # Both may go on from the same moment, so that however late this thread runs the large one is not over by then.
    small = pair.sender.schedule_layers(pair.chunk(source[:4], target[:4], first_value=2))
    pair.counter.bump(64)
    assert [event.transfer for event in rig.take(pair.sender, {EventKind.DONE}, 2, 60)] == [small, large]
    assert pair.sender.stats().in_flight_writes == 0


@pytest.mark.parametrize("provider", ["tcp", "net", "local"])
def test_a_revoked_key_fails_a_transfer_of_many_writes(provider) -> None:
    pair = rig.Pair(provider, LAYERS, PAGES, PAGE, gather=1)
    second = pair.receiver.register(pair.memory)
    source, target = pair.permuted(PAGES)
    descriptor = second.descriptor
    second.close()
    for count in (1, 2, 64, PAGES):
        pair.sender.schedule_layers(pair.chunk(source[:count], target[:count], remote=descriptor, counter=None))
        assert rig.end_of(pair.sender).kind is EventKind.FAILED
        assert landed(pair) == 0
    pair.sender.schedule_layers(pair.chunk(source, target, counter=None))
    assert rig.end_of(pair.sender).kind is EventKind.DONE
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))
    pair.close()


@pytest.mark.parametrize("provider", rig.OVER_NICS)
def test_a_receiver_killed_with_the_last_write_unconfirmed_fails_the_transfer(provider) -> None:
    """All writes have left, only the last one's confirmation is missing: that is no DONE."""
    memory = np.ones((64, PAGE), np.uint8)
    with (
        TransferEngine(provider, incarnation=1, gather=1) as engine,
        engine.register(memoryview(memory).cast("B")) as region,
        rig.receiver(provider, memory.nbytes) as doomed,
    ):

        def start(pages: int) -> Transfer:
            chunk = ChunkSchedule(
                counter=None, first_value=0, layers=1, region=region, slot=1, generation=1, length=PAGE,
                peer=engine.connect(doomed.descriptor.addresses), remote=doomed.descriptor, source_layer_stride=0,
                destination_layer_stride=0, source_page_stride=PAGE, destination_page_stride=PAGE,
                runs=runs(63 - np.arange(pages), np.arange(pages)),
            )  # fmt: skip
            return engine.schedule_layers(chunk)

        start(1)
        assert rig.end_of(engine).kind is EventKind.DONE
        rig.stop(doomed.process)
        transfer = start(16)
        # The queue is not read within a turn, so all 16 are in flight at its end. Those before the seal end when their
        # source may be used again, which needs no receiver; where every write is its own seal, none does.
        unconfirmed = 1 if provider in SEALED else 16
        rig.until(
            lambda: engine.stats().pages == 17 and engine.stats().in_flight_writes == unconfirmed, "all but the seal"
        )
        with pytest.raises(AssertionError, match="timed out"):
            rig.take(engine, rig.ENDS, seconds=0.2)
        assert engine.stats().in_flight_writes == unconfirmed
        doomed.kill()
        failed = rig.end_of(engine)
        assert (failed.kind, failed.transfer, failed.pages) == (EventKind.FAILED, transfer, 16)
        # What is in flight when a connection breaks ends as cancelled by the provider, however that has noticed (over
        # shm: as we have, who asked whether the receiver's process lives). NICs have error codes of their own.
        if provider in SEALED:
            assert failed.error == errno.ECONNRESET
            assert "connection lost with writes in flight" in failed.text
        for left in Path("/dev/shm").glob(f"{doomed.process.pid}:*"):
            left.unlink()
