"""Cancels, injected faults, revoked keys and killed receivers: every transfer ends, and says how."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fabric_rig as rig
import msgspec
import numpy as np
import pytest
import xxhash
from kvferry_fabric import ChunkSchedule, EventKind, FabricError, Transfer, TransferEngine, runs

HALF_SECOND_NS = 500_000_000
OVER_SOCKETS = ("tcp", "net")


@pytest.fixture(params=rig.PROVIDERS)
def pair(request: pytest.FixtureRequest) -> Iterator["rig.Pair"]:
    made = rig.Pair(request.param)
    yield made
    made.close()


def test_a_cancel_before_the_first_layer_posts_nothing(pair) -> None:
    source, target = pair.permuted(10)
    transfer = pair.sender.schedule_layers(pair.chunk(source, target))
    transfer.cancel()
    ended = rig.end_of(pair.sender)
    assert (ended.kind, ended.transfer, ended.pages) == (EventKind.CANCELLED, transfer, 0)
    pair.counter.bump(pair.layers)
    again = pair.sender.schedule_layers(pair.chunk(source, target, layers=1))
    assert rig.end_of(pair.sender).transfer == again
    np.testing.assert_array_equal(pair.target, pair.expected(source, target, 1))


def test_a_cancel_between_layers_keeps_what_was_sent_and_sends_no_more(pair) -> None:
    source, target = pair.permuted(10)
    pair.receiver.expect(1, 1, 10 * pair.layers)
    transfer = pair.sender.schedule_layers(pair.chunk(source, target))
    pair.counter.bump()
    rig.until(lambda: pair.receiver.arrived(1) == 10, "the first layer")
    transfer.cancel()
    assert rig.end_of(pair.sender).pages == 10
    pair.counter.bump(pair.layers)
    transfer.cancel()  # it has ended: nothing happens
    rig.until(lambda: pair.sender.stats().in_flight_writes == 0, "idleness")
    np.testing.assert_array_equal(pair.target, pair.expected(source, target, 1))
    assert pair.sender.poll() == []


def test_a_delayed_write_is_held_and_can_be_cancelled(pair) -> None:
    source, target = pair.permuted(10)
    pair.sender.fault("delay", HALF_SECOND_NS)
    pair.sender.schedule_layers(pair.chunk(source, target, layers=1))
    pair.counter.bump()
    done = rig.end_of(pair.sender)
    assert done.first_post_ns - done.last_counter_ns >= HALF_SECOND_NS
    pair.target[:] = 0xA5
    transfer = pair.sender.schedule_layers(pair.chunk(source, target, layers=1))
    transfer.cancel()
    assert rig.end_of(pair.sender).kind is EventKind.CANCELLED
    pair.sender.fault("delay", 0)
    assert (pair.target == 0xA5).all()


def test_a_corrupted_byte_is_wrong_at_the_receiver_alone(pair) -> None:
    source, target = pair.permuted(10)
    before = pair.source.copy()
    pair.sender.fault("corrupt", 2)
    pair.receiver.expect(1, 1, 10 * pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target))
    pair.counter.bump(pair.layers)
    assert rig.end_of(pair.sender).kind is EventKind.DONE
    rig.take(pair.receiver, {EventKind.ARRIVED})
    np.testing.assert_array_equal(pair.source, before)
    assert (pair.target != pair.expected(source, target)).sum() == 1


def test_a_refused_write_fails_its_transfer_and_no_other(pair) -> None:
    source, target = pair.permuted(20)
    pair.sender.fault("fail", 3)
    pair.counter.bump(pair.layers)
    pair.sender.schedule_layers(pair.chunk(source[:10], target[:10]))
    failed = rig.end_of(pair.sender)
    assert (failed.kind, failed.error) == (EventKind.FAILED, errno.EIO)
    assert "could not be posted" in failed.text
    assert failed.peer == pair.receiver.addresses[0]
    pair.sender.schedule_layers(pair.chunk(source[10:], target[10:]))
    assert rig.end_of(pair.sender).kind is EventKind.DONE


def test_an_unknown_fault_is_refused(pair) -> None:
    with pytest.raises(ValueError, match="'explode' is not one of"):
        pair.sender.fault("explode", 1)


@pytest.mark.parametrize("provider", [*OVER_SOCKETS, "local"])
def test_a_revoked_key_lets_nothing_land_and_fails_the_writer(provider) -> None:
    pair = rig.Pair(provider)
    second = pair.receiver.register(pair.memory)
    assert second.descriptor.domains[0].key != pair.remote.descriptor.domains[0].key
    pages = np.arange(5)

    def send(descriptor) -> EventKind:
        pair.target[:] = 0xA5
        pair.sender.schedule_layers(pair.chunk(pages, pages, remote=descriptor, counter=None))
        return rig.end_of(pair.sender).kind

    assert send(second.descriptor) is EventKind.DONE
    second.close()
    assert send(second.descriptor) is EventKind.FAILED
    assert (pair.target == 0xA5).all()
    # Over sockets the refusal breaks the connection; what is posted before we see that goes down with it.
    rig.until(lambda: send(pair.remote.descriptor) is EventKind.DONE, "the next connection")
    np.testing.assert_array_equal(pair.target, pair.expected(pages, pages))
    pair.close()


def test_memory_in_use_as_a_source_stays_registered() -> None:
    pair = rig.Pair("tcp")
    source, target = pair.permuted(3)
    transfer = pair.sender.schedule_layers(pair.chunk(source, target))
    for busy in (pair.region, pair.counter):
        with pytest.raises(FabricError, match="transfers"):
            busy.close()
    transfer.cancel()
    rig.end_of(pair.sender)
    pair.region.close()
    pair.counter.close()
    pair.counter.close()
    with pytest.raises(FabricError, match="closed"):
        pair.counter.bump()
    pair.close()


class Sender:
    """An engine with a large, scattered source and receivers in processes of their own."""

    def __init__(self, provider: str, pages: int = 4096, page: int = 4096) -> None:
        self.engine = TransferEngine(provider, incarnation=1)
        self.pages, self.page = pages, page
        self.memory = np.random.default_rng(3).integers(0, 256, (pages, page), dtype=np.uint8)
        self.region = self.engine.register(memoryview(self.memory).cast("B"))

    def start(self, receiver, pages: int, generation: int = 1) -> Transfer:
        return self.engine.schedule_layers(
            ChunkSchedule(
                counter=None, first_value=0, layers=1, region=self.region, slot=1, generation=generation,
                peer=self.engine.connect(receiver.descriptor.addresses), remote=receiver.descriptor,
                source_layer_stride=0, destination_layer_stride=0, source_page_stride=self.page, length=self.page,
                destination_page_stride=self.page, runs=runs(self.pages - 1 - np.arange(pages), np.arange(pages)),
            )
        )  # fmt: skip


@pytest.fixture(params=OVER_SOCKETS)
def sender(request: pytest.FixtureRequest) -> Iterator[Sender]:
    made = Sender(request.param)
    yield made
    made.engine.close()


def test_bytes_are_right_in_another_process(sender) -> None:
    with rig.receiver(sender.engine.provider, sender.memory.nbytes) as other:
        assert other.ask(f"expect 1 1 {sender.pages}") == "armed"
        sender.start(other, sender.pages)
        assert rig.end_of(sender.engine).kind is EventKind.DONE
        assert other.ask("wait 15") == ["ARRIVED"]
        assert other.ask("hash") == xxhash.xxh3_64_hexdigest(np.ascontiguousarray(sender.memory[::-1]))


def test_a_cancel_is_confirmed_only_when_nothing_is_in_flight(sender) -> None:
    with rig.receiver(sender.engine.provider, sender.memory.nbytes) as other:
        sender.start(other, 1)
        rig.end_of(sender.engine)
        rig.stop(other.process)
        transfer = sender.start(other, sender.pages)
        rig.until(lambda: sender.engine.stats().in_flight_writes > 0, "writes in flight")
        transfer.cancel()
        with pytest.raises(AssertionError, match="timed out"):
            rig.take(sender.engine, rig.ENDS, seconds=0.3)
        posted = sender.engine.stats().pages
        other.process.send_signal(signal.SIGCONT)
        cancelled = rig.end_of(sender.engine)
        assert (cancelled.kind, cancelled.transfer) == (EventKind.CANCELLED, transfer)
        assert sender.engine.stats().pages == posted < sender.pages
        landed = other.ask("hash")
        sender.start(other, 1)
        rig.end_of(sender.engine)
        assert other.ask("hash") == landed, "bytes landed after the cancel was confirmed"


def test_a_killed_receiver_fails_its_transfers_and_no_others(sender) -> None:
    provider = sender.engine.provider
    size = sender.memory.nbytes
    with rig.receiver(provider, size) as doomed, rig.receiver(provider, size) as healthy:
        sender.start(doomed, 1)
        rig.end_of(sender.engine)
        rig.stop(doomed.process)  # so that the transfer is certainly under way when it dies
        transfer = sender.start(doomed, sender.pages)
        rig.until(lambda: sender.engine.stats().in_flight_writes > 0, "writes in flight")
        doomed.kill()
        failed = rig.end_of(sender.engine)
        assert (failed.kind, failed.transfer, failed.error) == (EventKind.FAILED, transfer, errno.ECONNRESET)
        assert failed.peer == doomed.descriptor.addresses[0]
        healthy.ask(f"expect 1 1 {sender.pages}")
        sender.start(healthy, sender.pages)
        assert rig.end_of(sender.engine).kind is EventKind.DONE
        assert healthy.ask("wait 15") == ["ARRIVED"]
        sender.start(doomed, 1)  # its address answers no more
        assert rig.end_of(sender.engine).error in {errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED}
        with rig.receiver(provider, size) as restarted:
            restarted.ask("expect 1 1 7")
            sender.start(restarted, 7)
            assert rig.end_of(sender.engine).kind is EventKind.DONE
            assert restarted.ask("wait 15") == ["ARRIVED"]


WRITER = """
import sys
import msgspec
import numpy as np
from kvferry_fabric import ChunkSchedule, TransferEngine, runs
from kvferry_proto.memory import MemoryDescriptor
remote = msgspec.json.decode(sys.argv[1], type=MemoryDescriptor)
engine = TransferEngine(remote.provider, incarnation=3)
region, peer = engine.register(memoryview(bytearray(remote.length))), engine.connect(remote.addresses)
pages = np.arange(remote.length >> 20)
while True:
    engine.schedule_layers(ChunkSchedule(
        counter=None, first_value=0, layers=1, region=region, peer=peer, remote=remote, slot=1, generation=1,
        source_layer_stride=0, destination_layer_stride=0, source_page_stride=1 << 20, destination_page_stride=1 << 20,
        length=1 << 20, runs=runs(pages, pages)))
    while not engine.poll():
        pass
    print("written", flush=True)
"""


def test_senders_killed_while_writing_do_no_harm(sender) -> None:
    with rig.receiver(sender.engine.provider, sender.memory.nbytes) as other:
        descriptor = json.dumps(msgspec.to_builtins(other.descriptor))
        for _ in range(4):
            with subprocess.Popen([sys.executable, "-c", WRITER, descriptor], stdout=subprocess.PIPE) as writer:
                assert writer.stdout is not None
                writer.stdout.readline()
                writer.kill()
        assert other.ask("expect 1 2 5") == "armed"
        sender.start(other, 5, generation=2)
        assert rig.end_of(sender.engine).kind is EventKind.DONE
        assert other.ask("wait 15") == ["ARRIVED"]


def test_a_killed_receiver_over_shm_fails_its_transfers() -> None:
    sender = Sender("shm")
    with rig.receiver("shm", sender.memory.nbytes) as doomed:
        sender.start(doomed, 1)
        rig.end_of(sender.engine)
        rig.stop(doomed.process)
        sender.start(doomed, sender.pages)
        rig.until(lambda: sender.engine.stats().in_flight_writes > 0, "writes in flight")
        doomed.kill()
        assert rig.end_of(sender.engine).kind is EventKind.FAILED
        for left in Path("/dev/shm").glob(f"{doomed.process.pid}:*"):
            left.unlink()
    sender.engine.close()


OPENER = """
import os
from kvferry_fabric import TransferEngine

engine = TransferEngine("shm", incarnation=1)
os._exit(3)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a PID namespace")
def test_an_endpoint_over_shm_that_a_process_of_the_same_pid_left_is_in_nobodys_way() -> None:
    """In a PID namespace, as in a container, the first process is number 1 at every start."""
    try:
        for _ in range(2):
            opened = subprocess.run(["unshare", "--pid", "--fork", sys.executable, "-c", OPENER], check=False)
            assert opened.returncode == 3
            assert list(Path("/dev/shm").glob("1:*"))
    finally:
        for left in Path("/dev/shm").glob("1:*"):
            left.unlink()
