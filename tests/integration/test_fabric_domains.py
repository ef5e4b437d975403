"""Engines of several domains (NICs), on both sides as many or not: bytes, counts, and who carries how much."""

from collections.abc import Iterator

import fabric_rig as rig
import numpy as np
import pytest
from kvferry_fabric import EventKind, FabricError, TransferEngine

NICS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
COUNTS = [(1, 1), (2, 2), (3, 3), (1, 3), (3, 1), (3, 2), (2, 3)]


def open_pair(provider: str, ours: int, theirs: int, **options) -> "rig.Pair":
    return rig.Pair(provider, receiver={"domains": NICS[:theirs]}, domains=NICS[:ours], **options)


@pytest.fixture(params=[(provider, *counts) for provider in ("tcp", "net") for counts in COUNTS], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator["rig.Pair"]:
    made = open_pair(*request.param, pages=256, gather=1)
    yield made
    made.close()


def test_bytes_and_counts_are_right_whatever_way_the_pages_come(pair) -> None:
    for generation, count in enumerate([1, 65, 256]):
        pair.target[:] = 0xA5
        source, target = pair.permuted(count)
        pair.receiver.expect(1, generation, count * pair.layers)
        pair.sender.schedule_layers(pair.chunk(source, target, generation=generation, counter=None))
        done = rig.end_of(pair.sender)
        assert (done.kind, done.pages) == (EventKind.DONE, count * pair.layers)
        assert rig.take(pair.receiver, {EventKind.ARRIVED})[0].pages == count * pair.layers
        np.testing.assert_array_equal(pair.target, pair.expected(source, target))
        assert pair.receiver.disarm(1, generation)
    carried = pair.sender.domain_stats()
    assert all(domain.bytes > 0 for domain in carried), carried
    assert sum(domain.bytes for domain in carried) == pair.sender.stats().bytes
    assert all(domain.in_flight_bytes == domain.in_flight_writes == 0 for domain in carried)


def test_a_cancel_leaves_nothing_in_flight_in_any_domain() -> None:
    pair = open_pair("tcp", 3, 2, pages=512, gather=1)
    source, target = pair.permuted(512)
    for _ in range(10):
        pair.target[:] = 0xA5
        pages = pair.sender.stats().pages + int(pair.random.integers(1, 300))
        transfer = pair.sender.schedule_layers(pair.chunk(source, target, counter=None))
        rig.until(lambda pages=pages: pair.sender.stats().pages >= pages, "some pages")
        transfer.cancel()
        ended = rig.end_of(pair.sender)
        assert int((pair.target != 0xA5).any(axis=2).sum()) == ended.pages
        assert all(domain.in_flight_writes == 0 for domain in pair.sender.domain_stats())
    pair.close()


def test_every_domain_has_keys_of_its_own() -> None:
    pair = open_pair("tcp", 1, 3)
    other = pair.receiver.register(memoryview(bytearray(64)))
    keys = [domain.key for region in (pair.remote, other) for domain in region.descriptor.domains]
    assert len(set(keys)) == 6
    assert pair.remote.descriptor.addresses == pair.receiver.addresses == pair.peer.addresses
    pair.close()


def test_memory_must_be_of_the_peer_that_is_written_to() -> None:
    pair = open_pair("tcp", 1, 2)
    with (
        pair.sender.connect(pair.receiver.addresses[:1]) as half,
        pytest.raises(FabricError, match="cannot be written"),
    ):
        pair.sender.schedule_layers(pair.chunk(np.arange(1), np.arange(1), peer=half))
    pair.close()


@pytest.mark.parametrize("domains", [("127.0.0.1", "127.0.0.1"), tuple(f"127.0.0.{n}" for n in range(1, 10))])
def test_the_same_or_too_many_domains_are_refused(domains) -> None:
    with pytest.raises(FabricError, match=r"up to 8 domains, each another.*127\.0\.0\.1"):
        TransferEngine("tcp", incarnation=1, domains=domains)


def test_a_domain_that_is_not_of_this_host_is_named_and_nothing_is_left() -> None:
    with pytest.raises(FabricError, match=r"192\.0\.2\.1"):
        TransferEngine("tcp", incarnation=1, domains=("127.0.0.1", "192.0.2.1"))


def test_a_provider_without_addresses_has_one_domain() -> None:
    with pytest.raises(FabricError, match="'shm' binds to no address"):
        TransferEngine("shm", incarnation=1, domains=NICS)


@pytest.mark.parametrize("count", [0, 9])
def test_a_peer_of_no_or_too_many_domains_is_refused(count) -> None:
    with (
        TransferEngine("tcp", incarnation=1) as engine,
        pytest.raises(FabricError, match=f"1 to 8 addresses of domains, not {count}"),
    ):
        engine.connect(engine.addresses * count)


def test_a_write_that_a_domain_does_not_take_goes_by_another(pair) -> None:
    source, target = pair.permuted(256)
    ours = len(pair.sender.domain_stats())
    pair.sender.fault("fail", 70)
    pair.receiver.expect(1, 1, 256 * pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target, counter=None))
    ended = rig.end_of(pair.sender)
    if ours == 1 and len(pair.peer.addresses) == 1:
        assert (ended.kind, "domain 0 (127.0.0.1) to fi_sockaddr" in ended.text) == (EventKind.FAILED, True)
        return
    assert ended.kind is EventKind.DONE, ended
    assert rig.take(pair.receiver, {EventKind.ARRIVED})[0].pages == 256 * pair.layers, "no page is counted twice"
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))
    assert pair.sender.stats().outages == 1
