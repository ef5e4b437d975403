"""What the handle of a transfer promises: the engine in memory, one over libfabric, and copies within a host."""

import asyncio
import errno
import sys
import threading
from collections.abc import Iterator

import fabric_rig as rig
import numpy as np
import pytest
from kvferry_fabric import EventKind, FabricError, OutOfBoundsError, TransferState

ENGINES = ("memory", *dict.fromkeys((rig.PROVIDERS[0], rig.PROVIDERS[-1])))


@pytest.fixture(params=ENGINES)
def pair(request: pytest.FixtureRequest) -> Iterator["rig.Pair"]:
    made = rig.Pair(request.param)
    yield made
    made.close()


def waiting(pair: "rig.Pair", **options):
    """A transfer of ten pages a layer that waits for its counter."""
    return pair.sender.schedule_layers(pair.chunk(*pair.permuted(10)), **options)


def test_a_handle_tells_what_its_transfer_does(pair) -> None:
    transfer, other = waiting(pair), waiting(pair)
    assert len({transfer, other, transfer.id, other.id}) == 4
    assert (transfer.peer, transfer.deadline) == (pair.peer.addresses[0], None)
    assert transfer.state is TransferState.WAITING
    assert transfer.statistics[:3] == (0, 0, 0)
    pair.counter.bump()
    rig.until(lambda: transfer.statistics.pages == 10 and transfer.state is TransferState.WAITING, "the first layer")
    assert transfer.statistics.bytes == 10 * pair.page
    assert transfer.statistics.first_post_ns >= transfer.statistics.registered_ns > 0
    pair.counter.bump(pair.layers)
    done = transfer.drain(15)
    assert (done.kind, done.pages, done.transfer) == (EventKind.DONE, 10 * pair.layers, transfer)
    assert transfer.state is TransferState.DONE
    assert transfer.drain(0) is done
    assert transfer.statistics.pages == done.pages
    assert transfer.statistics.last_completion_ns == done.last_completion_ns
    other.drain(15)
    assert {event.transfer for event in rig.take(pair.sender, rig.ENDS, 2)} == {transfer, other}  # told all the same
    assert pair.sender.stats().held_transfers == 0
    assert (transfer.state, transfer.drain()) == (TransferState.DONE, done)
    transfer.cancel()
    assert transfer.state is TransferState.DONE


def test_waiting_for_a_transfer_that_does_not_end_gives_up_and_leaves_it(pair) -> None:
    transfer = waiting(pair)
    with pytest.raises(TimeoutError, match=f"transfer {transfer.id} to {transfer.peer}"):
        transfer.drain(0.01)
    transfer.cancel()
    assert transfer.drain(15).kind is EventKind.CANCELLED
    assert transfer.state is TransferState.CANCELLED


@pytest.mark.parametrize("attached", [True, False])
async def test_coroutines_wait_for_the_end_whoever_takes_events(pair, attached) -> None:
    transfer, heard = waiting(pair), asyncio.Queue()
    if attached:
        pair.sender.attach(asyncio.get_running_loop(), heard.put_nowait)
    waiters = [asyncio.create_task(transfer.drained()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]
    assert transfer.state is TransferState.WAITING
    pair.counter.bump(pair.layers)
    first, second = await asyncio.wait_for(asyncio.gather(*waiters[1:]), 15)
    assert first is second is await transfer.drained()
    assert first.kind is EventKind.DONE
    told = [await asyncio.wait_for(heard.get(), 15)] if attached else pair.sender.poll()
    assert [event.transfer for event in told] == [transfer]


async def test_a_closed_engine_keeps_nobody_waiting(pair) -> None:
    transfer = waiting(pair)
    waiter = asyncio.create_task(transfer.drained())
    await asyncio.sleep(0)
    pair.sender.close()
    with pytest.raises(FabricError, match="closed"):
        await asyncio.wait_for(waiter, 15)
    for call in (lambda: transfer.state, transfer.drain, transfer.cancel):
        with pytest.raises(FabricError, match="closed"):
            call()


def test_a_transfer_fails_when_its_deadline_is_over(pair) -> None:
    late, cancelled, other = waiting(pair, deadline=0.03), waiting(pair, deadline=60), waiting(pair)
    assert (late.deadline, cancelled.deadline) == (0.03, 60)
    failed = late.drain(15)
    assert (failed.kind, failed.error, failed.pages) == (EventKind.FAILED, errno.ETIMEDOUT, 0)
    assert "not over within 0.03" in failed.text
    assert rig.BIND in failed.text or late.peer in failed.text
    assert late.state is TransferState.FAILED
    cancelled.cancel()
    assert cancelled.drain(15).kind is EventKind.CANCELLED
    pair.counter.bump(pair.layers)
    assert other.drain(15).kind is EventKind.DONE
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive number of seconds"):
            waiting(pair, deadline=wrong)
    assert len(rig.take(pair.sender, rig.ENDS, 3)) == 3


def test_over_its_deadline_a_transfer_still_ends_only_when_nothing_is_in_flight() -> None:
    pair = rig.Pair("memory", layers=1)
    pair.network.automatic = False
    pages = np.arange(0, 6, 2)
    transfer = pair.sender.schedule_layers(pair.chunk(pages, pages, counter=None), deadline=0.01)
    with pytest.raises(TimeoutError):
        transfer.drain(0.02)
    assert transfer.state is TransferState.DRAINING
    assert pair.sender.poll() == []
    pair.network.run()
    failed = transfer.drain(0)
    assert (failed.kind, failed.error, failed.pages) == (EventKind.FAILED, errno.ETIMEDOUT, 3)
    pair.close()


def test_threads_wait_while_another_takes_the_events() -> None:
    pair = rig.Pair(rig.PROVIDERS[0])
    ends = []
    for _ in range(20):
        transfer = waiting(pair)
        threads = [threading.Thread(target=lambda one=transfer: ends.append(one.drain(15))) for _ in range(3)]
        for thread in threads:
            thread.start()
        pair.counter.bump(pair.layers + 1)
        assert rig.end_of(pair.sender).transfer is transfer
        for thread in threads:
            thread.join()
    assert [event.kind for event in ends] == [EventKind.DONE] * 60
    pair.close()


def test_pages_of_every_layer_go_at_once(pair) -> None:
    source, target = pair.permuted(10)
    pair.receiver.expect(1, 1, 10 * pair.layers)
    done = pair.sender.write_pages(pair.chunk(source, target), deadline=60).drain(15)  # the counter stands at 0
    assert (done.kind, done.pages) == (EventKind.DONE, 10 * pair.layers)
    rig.take(pair.receiver, {EventKind.ARRIVED})
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))


def test_an_immediate_alone_counts_and_writes_nothing(pair) -> None:
    where = {"peer": pair.peer, "remote": pair.remote.descriptor, "slot": 5, "generation": 3}
    pair.receiver.expect(5, 3, 8)
    transfers = [pair.sender.write_immediate(**where, pages=pages) for pages in (0, 7)]
    transfers.append(pair.sender.write_immediate(**where))
    for transfer in transfers:
        done = transfer.drain(15)
        assert (done.kind, done.bytes, done.writes) == (EventKind.DONE, 0, 1)
    [arrived] = rig.take(pair.receiver, {EventKind.ARRIVED})
    assert (arrived.slot, arrived.pages) == (5, 8)
    assert (pair.target == 0xA5).all()
    pair.sender.fault("corrupt", 1)  # there is no byte to turn
    assert pair.sender.write_immediate(**where, pages=0).drain(15).kind is EventKind.DONE
    for wrong in ({"pages": 4096}, {"pages": -1}, {"slot": 1024}, {"generation": 1024}):
        with pytest.raises(OutOfBoundsError):
            pair.sender.write_immediate(**{**where, **wrong})
    with pytest.raises(FabricError, match="cannot be written through"):
        pair.sender.write_immediate(**{**where, "remote": pair.region.descriptor})


def test_a_bump_does_not_give_the_interpreter_away(pair) -> None:
    """Another thread that waits for it would keep it up to 5 ms, after every layer."""
    start, ran = threading.Lock(), threading.Event()
    start.acquire()
    interval = sys.getswitchinterval()

    def other() -> None:
        start.acquire()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        start.release()
        for _ in range(1000):
            pair.counter.bump()
        kept = not ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert kept
