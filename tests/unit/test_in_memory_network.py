"""What a test can do to writes between engines in memory: each means what it says."""

import errno
from collections.abc import Iterator

import fabric_rig as rig
import numpy as np
import pytest
from kvferry_fabric import EventKind, TransferState

PAGES = np.array([1, 3, 5])
"""No neighbours: a write each."""


@pytest.fixture
def pair() -> Iterator["rig.Pair"]:
    made = rig.Pair("memory", layers=1, pages=8, page=64)
    made.network.automatic = False
    made.receiver.expect(1, 1, PAGES.size)
    yield made
    made.close()


def begin(pair):
    """A transfer whose three writes are on their way."""
    transfer = pair.sender.schedule_layers(pair.chunk(PAGES, PAGES, counter=None))
    assert (transfer.state, len(pair.network.flying)) == (TransferState.DRAINING, 3)
    assert (pair.target == 0xA5).all()
    return transfer


def landed(pair) -> list[int]:
    """Pages that are not as they were."""
    return [page for page in range(pair.pages) if (pair.target[0, page] != 0xA5).any()]


def test_writes_land_and_complete_in_any_order(pair) -> None:
    transfer, (first, second, third) = begin(pair), pair.network.flying
    pair.network.complete(third)
    assert (landed(pair), pair.receiver.arrived(1)) == ([5], 1)
    pair.network.complete(first)
    assert (landed(pair), pair.sender.poll()) == ([1, 5], [])
    pair.network.complete(second)
    assert [event.kind for event in pair.receiver.poll()] == [EventKind.ARRIVED]
    assert [(event.kind, event.transfer) for event in pair.sender.poll()] == [(EventKind.DONE, transfer)]
    np.testing.assert_array_equal(pair.target, pair.expected(PAGES, PAGES))


def test_what_has_landed_is_in_flight_until_the_sender_hears_of_it(pair) -> None:
    transfer, writes = begin(pair), list(pair.network.flying)
    for write in writes:
        pair.network.land(write)
        pair.network.land(write)
    assert (landed(pair), pair.receiver.arrived(1)) == ([1, 3, 5], 3)
    transfer.cancel()
    assert (transfer.state, pair.sender.poll()) == (TransferState.DRAINING, [])
    for write in writes:
        pair.network.complete(write)
    assert pair.receiver.arrived(1) == 3
    assert [event.kind for event in pair.sender.poll()] == [EventKind.DONE]


def test_a_write_that_fails_is_told_to_the_sender_alone(pair) -> None:
    transfer, (first, second, third) = begin(pair), pair.network.flying
    pair.network.fail(second, errno.EACCES)
    assert (transfer.state, pair.sender.poll()) == (TransferState.DRAINING, [])
    pair.network.complete(first)
    pair.network.complete(third)
    failed = rig.end_of(pair.sender)
    assert (failed.kind, failed.error, landed(pair)) == (EventKind.FAILED, errno.EACCES, [1, 5])
    assert pair.receiver.poll() == []


def test_a_write_that_is_dropped_is_told_to_nobody_until_its_receiver_is_lost(pair) -> None:
    transfer, (first, second, third) = begin(pair), pair.network.flying
    pair.network.drop(second)
    pair.network.complete(first)
    pair.network.complete(third)
    assert (transfer.state, landed(pair), pair.sender.poll()) == (TransferState.DRAINING, [1, 5], [])
    pair.network.lose(pair.receiver.address)
    failed = rig.end_of(pair.sender)
    assert (failed.kind, failed.error) == (EventKind.FAILED, errno.ECONNRESET)


def test_what_is_on_its_way_to_one_that_is_forgotten_never_lands(pair) -> None:
    transfer, first = begin(pair), pair.network.flying[0]
    pair.network.land(first)
    pair.sender.forget(pair.receiver.addresses)
    assert (transfer.state, pair.network.flying) == (TransferState.FAILED, [])
    pair.network.run()
    assert landed(pair) == [1]


def test_a_seed_is_an_order(pair, monkeypatch) -> None:
    orders, came = set(), []
    monkeypatch.setattr(pair.network, "land", lambda write: came.append(write.pieces[0][0] // pair.page))
    for seed in range(12):
        begun = begin(pair)
        pair.network.run(seed)
        assert begun.state is TransferState.DONE
        orders.add(tuple(came))
        came.clear()
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {tuple(PAGES)}
