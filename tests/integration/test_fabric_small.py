"""Small writes, whose confirmation follows them: they end no sooner, and nothing of them lands any later."""

import errno
import signal

import fabric_rig as rig
import numpy as np
import pytest
from kvferry_fabric import EventKind, Transfer

OVER_SOCKETS = tuple(name for name in rig.PROVIDERS if name in {"tcp", "net"})
PAGE = 4096


def write(pair, slot: int, length: int = PAGE) -> Transfer:
    return pair.sender.write(
        peer=pair.peer, region=pair.region, source_offset=0, remote=pair.remote.descriptor, destination_offset=0,
        length=length, slot=slot, generation=1,
    )  # fmt: skip


@pytest.mark.parametrize("provider", rig.PROVIDERS)
def test_memory_given_to_others_once_its_page_was_counted_stays_theirs(provider) -> None:
    pair = rig.Pair(provider)
    for slot in range(100):
        pair.receiver.expect(slot, 1, 1)
        write(pair, slot)
        assert rig.take(pair.receiver, {EventKind.ARRIVED})[0].pages == 1
        np.testing.assert_array_equal(pair.target[0, 0], pair.source[0, 0])
        pair.target[:] = 0xA5
        assert rig.end_of(pair.sender).kind is EventKind.DONE
        assert (pair.target == 0xA5).all(), "something was written after the page was counted"
    pair.close()


@pytest.mark.parametrize("provider", rig.PROVIDERS)
def test_small_writes_beside_each_other_all_end_and_count_once(provider) -> None:
    pair = rig.Pair(provider)
    pair.receiver.expect(1, 1, 200)
    transfers = {write(pair, 1, length=PAGE if i % 3 else 1) for i in range(200)}
    ended = rig.take(pair.sender, {EventKind.DONE}, 200)
    assert {event.transfer for event in ended} == transfers
    assert (sum(event.writes for event in ended), sum(event.pages for event in ended)) == (200, 200)
    assert rig.take(pair.receiver, {EventKind.ARRIVED})[0].pages == 200
    assert pair.sender.stats()[1:4] == (0, 0, 0)
    pair.close()


@pytest.mark.parametrize("provider", OVER_SOCKETS)
@pytest.mark.parametrize("end", ["kill", "go on"])
def test_a_small_write_that_waits_in_a_socket_has_not_ended(provider, end) -> None:
    memory = np.full(PAGE, 7, np.uint8)
    engine = rig.open_engine(provider, rig.Network(), 1)
    with engine, rig.receiver(provider, PAGE) as other, engine.register(memoryview(memory)) as region:
        rig.schedule(engine, region, other.descriptor, np.arange(1))
        assert rig.end_of(engine).kind is EventKind.DONE
        rig.stop(other.process)
        transfer = rig.schedule(engine, region, other.descriptor, np.arange(1))
        with pytest.raises(AssertionError, match="timed out"):
            rig.take(engine, rig.ENDS, seconds=0.3)
        transfer.cancel()
        with pytest.raises(AssertionError, match="timed out"):
            rig.take(engine, rig.ENDS, seconds=0.1)
        other.kill() if end == "kill" else other.process.send_signal(signal.SIGCONT)
        event = rig.end_of(engine)
        expected = (EventKind.FAILED, errno.ECONNRESET) if end == "kill" else (EventKind.DONE, 0)
        assert (event.transfer, event.kind, event.error) == (transfer, *expected)
        assert engine.stats().in_flight_writes == 0
