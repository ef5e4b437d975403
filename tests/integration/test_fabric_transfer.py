"""Page transfers between two engines, on every provider: bytes, order, counts, events."""

import asyncio
from collections.abc import Iterator

import fabric_rig as rig
import numpy as np
import pytest
from kvferry_fabric import Event, EventKind, FabricError


@pytest.fixture(params=("memory", *rig.PROVIDERS))
def pair(request: pytest.FixtureRequest) -> Iterator["rig.Pair"]:
    made = rig.Pair(request.param, trace=True)
    yield made
    made.close()


def test_scattered_pages_arrive_where_they_should_and_gaps_are_untouched(pair) -> None:
    source, target = pair.permuted(30)
    pair.receiver.expect(1, 1, 30 * pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target))
    pair.counter.bump(pair.layers)
    done = rig.end_of(pair.sender)
    assert (done.kind, done.pages, done.bytes) == (EventKind.DONE, 30 * pair.layers, 30 * pair.layers * pair.page)
    arrived = rig.take(pair.receiver, {EventKind.ARRIVED})[0]
    assert (arrived.slot, arrived.generation, arrived.pages) == (1, 1, 30 * pair.layers)
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))


def test_nothing_of_a_layer_arrives_before_its_counter_moved(pair) -> None:
    source, target = pair.permuted(10)
    pair.receiver.expect(1, 1, 10 * pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target))
    for layer in range(pair.layers):
        np.testing.assert_array_equal(pair.target, pair.expected(source, target, layer))
        assert pair.receiver.arrived(1) == 10 * layer
        pair.counter.bump()
        rig.until(lambda n=10 * (layer + 1): pair.receiver.arrived(1) == n, "the layer's pages")
    done = rig.end_of(pair.sender)
    assert done.kind is EventKind.DONE
    assert all(seen <= posted for seen, posted in zip(done.layers.seen, done.layers.posted, strict=True))
    assert list(done.layers.posted) == sorted(done.layers.posted)
    assert done.registered_ns <= done.layers.seen[0] <= done.first_post_ns <= done.last_completion_ns
    assert done.last_counter_ns == done.layers.seen[-1]
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))


def test_coalesced_bumps_post_every_layer_in_the_range(pair) -> None:
    source, target = pair.permuted(5)
    pair.receiver.expect(1, 1, 5 * pair.layers)
    pair.counter.bump(2)
    pair.sender.schedule_layers(pair.chunk(source, target))
    rig.until(lambda: pair.receiver.arrived(1) == 10, "two layers")
    np.testing.assert_array_equal(pair.target, pair.expected(source, target, 2))
    pair.counter.bump(7)
    assert rig.end_of(pair.sender).kind is EventKind.DONE
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))


def test_neighbouring_pages_travel_as_one_write(pair) -> None:
    source, target = np.arange(4, 36), np.arange(10, 42)
    pair.receiver.expect(1, 1, 32 * pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target))
    pair.counter.bump(pair.layers)
    done = rig.end_of(pair.sender)
    assert (done.writes, done.pages) == (pair.layers, 32 * pair.layers)
    assert rig.take(pair.receiver, {EventKind.ARRIVED})[0].pages == 32 * pair.layers
    assert pair.receiver.stats().arrivals == pair.layers
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))


@pytest.mark.parametrize(
    ("provider", "page", "writes"),
    [("tcp", 4096, 3), ("tcp", 16384, 3), ("net", 16384, 3), ("shm", 4096, 12), ("shm", 16384, 3)],
)
def test_scattered_pages_share_a_write_where_that_is_faster(provider, page, writes) -> None:
    if provider not in rig.PROVIDERS:
        pytest.skip(f"{provider} is not tested here")
    pair = rig.Pair(provider, layers=1, page=page)
    source, target = np.arange(0, 24, 2), np.arange(46, 22, -2)
    try:
        pair.sender.schedule_layers(pair.chunk(source, target, counter=None))
        assert rig.end_of(pair.sender).writes == writes
        np.testing.assert_array_equal(pair.target, pair.expected(source, target))
    finally:
        pair.close()


def test_pieces_of_pages_land_at_their_offsets(pair) -> None:
    source, target = np.array([3, 4, 5, 20]), np.array([7, 8, 9, 1])
    pair.receiver.expect(1, 1, 4 * pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target, length=1000, source_offset=24, destination_offset=3096))
    pair.counter.bump(pair.layers)
    assert rig.end_of(pair.sender).pages == 4 * pair.layers
    want = np.full_like(pair.target, 0xA5)
    want[:, target, 3096:4096] = pair.source[:, source, 24:1024]
    np.testing.assert_array_equal(pair.target, want)


def test_an_empty_schedule_is_done_at_once(pair) -> None:
    pair.receiver.expect(1, 1, 0)
    assert rig.take(pair.receiver, {EventKind.ARRIVED})[0].pages == 0
    empty = np.empty(0, np.int64)
    transfer = pair.sender.schedule_layers(pair.chunk(empty, empty))
    done = rig.end_of(pair.sender)
    assert (done.kind, done.transfer, done.pages, done.first_post_ns) == (EventKind.DONE, transfer, 0, 0)


def test_a_context_write_counts_as_one_page(pair) -> None:
    pair.receiver.expect(9, 3, 1)
    pair.sender.write(
        peer=pair.peer, region=pair.region, source_offset=100, remote=pair.remote.descriptor, destination_offset=777,
        length=5001, slot=9, generation=3,
    )  # fmt: skip
    assert rig.end_of(pair.sender).bytes == 5001
    rig.take(pair.receiver, {EventKind.ARRIVED})
    flat = pair.target.reshape(-1)
    np.testing.assert_array_equal(flat[777:5778], pair.source.reshape(-1)[100:5101])
    assert (flat[:777] == 0xA5).all()
    assert (flat[5778:] == 0xA5).all()


def test_a_stale_generation_is_counted_and_ignored(pair) -> None:
    source, target = pair.permuted(8)
    pair.receiver.expect(1, 2, 8)
    pair.sender.schedule_layers(pair.chunk(source, target, generation=1, layers=1))
    pair.counter.bump()
    stale_writes = rig.end_of(pair.sender).writes
    rig.until(lambda: pair.receiver.stats().stale_immediates == stale_writes, "the stale immediates")
    assert pair.receiver.arrived(1) == 0
    pair.sender.schedule_layers(pair.chunk(source, target, generation=2, layers=1))
    assert rig.take(pair.receiver, {EventKind.ARRIVED})[0].generation == 2


def test_more_pages_than_expected_is_an_overrun(pair) -> None:
    source, target = np.arange(8), np.arange(8)  # one write, which jumps over the number
    pair.receiver.expect(1, 1, 7)
    pair.sender.schedule_layers(pair.chunk(source, target, layers=1))
    pair.counter.bump()
    rig.end_of(pair.sender)
    assert rig.take(pair.receiver, {EventKind.OVERRUN})[0].pages == 8


def test_two_schedules_on_one_counter_and_one_on_another(pair) -> None:
    other = pair.sender.new_counter()
    pages = pair.random.permutation(pair.pages)
    parts = [pages[:10], pages[10:20], pages[20:30]]
    for slot, part in enumerate(parts):
        pair.receiver.expect(slot, 1, 10 * pair.layers)
        counter = other if slot == 2 else pair.counter
        pair.sender.schedule_layers(pair.chunk(part, part, slot=slot, counter=counter, first_value=1))
    pair.counter.bump(pair.layers)
    assert {event.slot for event in rig.take(pair.sender, rig.ENDS, 2)} == {0, 1}
    assert pair.receiver.arrived(2) == 0
    other.bump(pair.layers)
    assert rig.end_of(pair.sender).slot == 2
    np.testing.assert_array_equal(pair.target, pair.expected(pages[:30], pages[:30]))


def test_chunks_follow_each_other_on_one_counter(pair) -> None:
    pages = pair.random.permutation(pair.pages)[:20]
    pair.receiver.expect(1, 1, 20 * pair.layers)
    for number, part in enumerate((pages[:10], pages[10:])):
        pair.sender.schedule_layers(pair.chunk(part, part, first_value=1 + number * pair.layers))
    pair.counter.bump(pair.layers)
    rig.end_of(pair.sender)
    np.testing.assert_array_equal(pair.target, pair.expected(pages[:10], pages[:10]))
    pair.counter.bump(pair.layers)
    rig.end_of(pair.sender)
    rig.take(pair.receiver, {EventKind.ARRIVED})
    np.testing.assert_array_equal(pair.target, pair.expected(pages, pages))


async def test_events_reach_an_event_loop(pair) -> None:
    arrived: asyncio.Queue = asyncio.Queue()
    pair.receiver.attach(asyncio.get_running_loop(), arrived.put_nowait)
    source, target = pair.permuted(6)
    pair.receiver.expect(1, 1, 6 * pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target))
    pair.counter.bump(pair.layers)
    async with asyncio.timeout(15):
        assert (await arrived.get()).kind is EventKind.ARRIVED
    pair.receiver.detach()
    rig.end_of(pair.sender)


async def test_a_callback_that_raises_keeps_no_event_from_the_next(pair) -> None:
    loop, arrived, told = asyncio.get_running_loop(), asyncio.Queue(), []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))

    def callback(event: Event) -> None:
        arrived.put_nowait(event.slot)
        raise ValueError(event.slot)

    for slot in (1, 2):
        pair.receiver.expect(slot, 1, 0)  # an empty transfer has arrived at once
    pair.receiver.attach(loop, callback)
    async with asyncio.timeout(15):
        assert [await arrived.get(), await arrived.get()] == [1, 2]
    pair.receiver.detach()
    assert [str(error) for error in told] == ["1", "2"]


def test_a_slot_is_armed_once_and_disarmed_quietly(pair) -> None:
    pair.receiver.expect(5, 1, 3)
    with pytest.raises(FabricError, match="slot 5 cannot be armed for generation 2"):
        pair.receiver.expect(5, 2, 3)
    assert not pair.receiver.disarm(5, 2)
    assert pair.receiver.disarm(5, 1)
    assert not pair.receiver.disarm(5, 1)
    with pytest.raises(FabricError, match="slot 1024"):
        pair.receiver.expect(1024, 1, 3)


def test_disarm_drops_events_that_were_not_polled(pair) -> None:
    pair.receiver.expect(5, 1, 0)
    pair.receiver.disarm(5, 1)
    assert pair.receiver.poll() == []
