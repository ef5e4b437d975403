"""What every transfer engine promises beside moving pages: the one in memory and one over libfabric are held to it."""

import errno
from collections.abc import Iterator

import fabric_rig as rig
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_fabric import EventKind, FabricError, OutOfBoundsError

ENGINES = ("memory", rig.PROVIDERS[0])
HELD = ("armed_slots", "active_transfers", "held_transfers", "in_flight_writes", "regions", "peers", "counters")


@pytest.fixture(params=ENGINES)
def pair(request: pytest.FixtureRequest) -> Iterator["rig.Pair"]:
    made = rig.Pair(request.param)
    yield made
    made.close()


def test_a_cancelled_transfer_posts_no_more_and_ends_once(pair) -> None:
    source, target = pair.permuted(10)
    pair.receiver.expect(1, 1, 10 * pair.layers)
    transfer = pair.sender.schedule_layers(pair.chunk(source, target))
    pair.counter.bump()
    rig.until(lambda: pair.receiver.arrived(1) == 10, "the first layer")
    transfer.cancel()
    ended = rig.end_of(pair.sender)
    assert (ended.kind, ended.transfer, ended.pages) == (EventKind.CANCELLED, transfer, 10)
    transfer.cancel()
    pair.counter.bump(pair.layers)
    assert pair.sender.poll() == []
    np.testing.assert_array_equal(pair.target, pair.expected(source, target, 1))


def test_faults_hit_the_write_that_they_are_set_for(pair) -> None:
    source, target = pair.permuted(20)
    pair.counter.bump(pair.layers)
    pair.sender.fault("fail", 1)
    pair.sender.schedule_layers(pair.chunk(source[:10], target[:10]))
    failed = rig.end_of(pair.sender)
    assert (failed.kind, failed.error, failed.peer) == (EventKind.FAILED, errno.EIO, pair.peer.addresses[0])
    assert "could not be posted" in failed.text
    pair.sender.fault("corrupt", 1)
    pair.sender.schedule_layers(pair.chunk(source, target))
    assert rig.end_of(pair.sender).kind is EventKind.DONE
    assert (pair.target != pair.expected(source, target)).sum() == 1
    with pytest.raises(ValueError, match="'explode' is not one of"):
        pair.sender.fault("explode", 1)


def test_a_delayed_write_waits_and_can_be_cancelled(pair) -> None:
    source, target = pair.permuted(5)
    pair.sender.fault("delay", 50_000_000)
    pair.sender.schedule_layers(pair.chunk(source, target, layers=1))
    pair.counter.bump()
    done = rig.end_of(pair.sender)
    assert done.first_post_ns - done.last_counter_ns >= 50_000_000
    pair.target[:] = 0xA5
    pair.sender.schedule_layers(pair.chunk(source, target, layers=1)).cancel()
    assert rig.end_of(pair.sender).kind is EventKind.CANCELLED
    assert (pair.target == 0xA5).all()


def test_a_closed_regions_key_opens_nothing(pair) -> None:
    second = pair.receiver.register(memoryview(pair.target).cast("B"))
    assert second.descriptor.domains != pair.remote.descriptor.domains
    second.close()
    pages = np.arange(5)
    pair.sender.schedule_layers(pair.chunk(pages, pages, remote=second.descriptor, counter=None))
    assert rig.end_of(pair.sender).kind is EventKind.FAILED
    assert (pair.target == 0xA5).all()
    pair.sender.schedule_layers(pair.chunk(pages, pages, counter=None))
    assert rig.end_of(pair.sender).kind is EventKind.DONE


def test_handles_are_kept_while_a_transfer_needs_them_and_are_of_their_engine_alone(pair) -> None:
    pages = np.arange(3)
    transfer = pair.sender.schedule_layers(pair.chunk(pages, pages))
    for busy in (pair.region, pair.counter):
        with pytest.raises(FabricError, match="transfers"):
            busy.close()
    transfer.cancel()
    rig.end_of(pair.sender)
    other = pair.receiver.new_counter()
    for wrong in (
        {"region": pair.remote},
        {"counter": other},
        {"peer": pair.receiver.connect(pair.receiver.addresses)},
    ):
        with pytest.raises(FabricError, match="of this engine"):
            pair.sender.schedule_layers(pair.chunk(pages, pages, **wrong))
    other.close()
    for handle in (pair.region, pair.counter, pair.peer):
        handle.close()
        handle.close()
    with pytest.raises(FabricError, match="closed"):
        pair.counter.bump()
    stats = pair.sender.stats()
    assert {name: getattr(stats, name) for name in HELD} == dict.fromkeys(HELD, 0)


def test_transfers_to_one_that_is_forgotten_fail_and_it_can_be_written_to_again(pair) -> None:
    source, target = pair.permuted(5)
    pair.sender.schedule_layers(pair.chunk(source, target))
    pair.sender.forget(pair.receiver.addresses, pair.receiver.seat)
    failed = rig.end_of(pair.sender)
    assert (failed.kind, failed.error) == (EventKind.FAILED, errno.ECONNRESET)
    assert "held to be lost" in failed.text
    pair.counter.bump(pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target))
    assert rig.end_of(pair.sender).kind is EventKind.DONE
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))
    with pytest.raises(FabricError, match="not hexadecimal"):
        pair.sender.forget(("zz",))


def test_what_cannot_be_is_refused_at_once(pair) -> None:
    for address in ("zz", "", "00", "ff" * 300):
        with pytest.raises(FabricError, match=r"not hexadecimal|not an address"):
            pair.sender.connect((address,))
    with pytest.raises(BufferError):
        pair.sender.register(memoryview(b"read only"))
    for wrong in ((1024, 1, 3), (-1, 1, 3), (1, 1024, 3), (1, -1, 3), (1, 1, -3)):
        with pytest.raises(FabricError, match=f"slot {wrong[0]}, generation {wrong[1]} cannot be armed"):
            pair.receiver.expect(*wrong)
        assert pair.receiver.disarm(*wrong[:2]) is False
        assert pair.receiver.arrived(wrong[0]) == 0
    pair.receiver.expect(1, 1, 3)
    with pytest.raises(FabricError, match="armed already"):
        pair.receiver.expect(1, 2, 3)
    strange = pair.sender.register(memoryview(bytearray(64)))
    with pytest.raises(FabricError, match="cannot be written through"):
        pair.sender.schedule_layers(pair.chunk(np.arange(1), np.arange(1), remote=strange.descriptor))


def test_a_closed_engine_says_so(pair) -> None:
    pair.sender.close()
    pair.sender.close()
    for call in (pair.sender.poll, pair.sender.stats, pair.sender.new_counter, lambda: pair.sender.arrived(1)):
        with pytest.raises(FabricError, match="closed"):
            call()


@pytest.fixture(scope="module")
def both() -> Iterator[list["rig.Pair"]]:
    pairs = [rig.Pair(engine, layers=3, pages=8, page=512) for engine in ENGINES]
    yield pairs
    for made in pairs:
        made.close()


WIDE = st.one_of(
    st.integers(0, 3 * 512), st.sampled_from([8 * 512, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -1])
)
ROW = st.tuples(st.integers(-1, 9), st.integers(-1, 9), st.sampled_from([0, 1, 2, 7, 8, 2**31 - 1]))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_both_take_and_refuse_the_same_schedules(both, data) -> None:
    names = ("start", "layer_stride", "page_stride", "offset")
    changes = {f"{side}_{name}": data.draw(WIDE) for side in ("source", "destination") for name in names}
    changes |= {"length": data.draw(WIDE), "layers": data.draw(st.integers(0, 4)), "first_value": 1 << 40}
    rows = np.array(data.draw(st.lists(ROW, min_size=1, max_size=3)), np.int32)
    keep = data.draw(st.sets(st.sampled_from(sorted(changes))))
    changes = {name: value for name, value in changes.items() if name in keep} | {"first_value": 1 << 40}
    room = data.draw(st.sampled_from([0, 512, 3 * 8 * 512]))
    verdicts = []
    for pair in both:
        remote = msgspec.structs.replace(pair.remote.descriptor, length=room)
        try:
            chunk = pair.chunk(np.arange(1), np.arange(1), runs=rows, remote=remote, **changes)
            pair.sender.schedule_layers(chunk).cancel()
        except OutOfBoundsError:
            verdicts.append("refused")
        else:
            verdicts.append(rig.end_of(pair.sender).pages)
    assert verdicts[0] == verdicts[1], (changes, rows)
