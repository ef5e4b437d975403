"""Peers on one host: shared memory instead of a NIC, and nothing of the contract is lost by it."""

import errno
import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import fabric_rig as rig
import msgspec
import numpy as np
import pytest
import xxhash
from fabric_rig import schedule
from kvferry_fabric import EventKind, FabricError, SharedMemory, TransferEngine

PIECE = 256 << 10
"""Bytes that are copied between two looks at whether the key still holds (KF_PIECE)."""


@pytest.fixture
def sender() -> Iterator[TransferEngine]:
    with TransferEngine("local", incarnation=1, stall_seconds=0.5) as engine:
        yield engine


def open_fds(process: "subprocess.Popen[str]") -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def memory_of(process: "subprocess.Popen[str]") -> str:
    return Path(f"/proc/{process.pid}/maps").read_text(encoding="ascii")


def test_auto_goes_around_the_nic_where_memory_is_shared() -> None:
    pair = rig.Pair("auto")
    source, target = pair.permuted(20)
    pair.receiver.expect(1, 1, 20 * pair.layers)
    pair.sender.schedule_layers(pair.chunk(source, target, counter=None))
    done = rig.end_of(pair.sender)
    assert done.kind is EventKind.DONE
    rig.take(pair.receiver, {EventKind.ARRIVED})
    np.testing.assert_array_equal(pair.target, pair.expected(source, target))
    assert pair.sender.stats().local_bytes == done.bytes == 20 * pair.layers * pair.page
    assert pair.sender.domain_stats()[0].bytes == 0
    pair.close()


def test_auto_takes_the_nic_for_memory_that_is_not_shared() -> None:
    pair = rig.Pair("auto")
    private = np.zeros_like(pair.source)
    region = pair.receiver.register(memoryview(private).cast("B"))
    assert region.descriptor.local is None
    pair.sender.schedule_layers(pair.chunk(np.arange(5), np.arange(5), counter=None, remote=region.descriptor))
    assert rig.end_of(pair.sender).kind is EventKind.DONE
    assert pair.sender.stats().local_bytes == 0
    np.testing.assert_array_equal(private[:, :5], pair.source[:, :5])
    pair.close()


def test_a_provider_that_was_named_is_the_only_one_used() -> None:
    with TransferEngine("tcp", incarnation=1) as named, TransferEngine("auto", incarnation=2) as auto:
        with SharedMemory.create(4096, "test") as memory, named.register(memory) as region:
            assert (named.seat, region.descriptor.local, region.descriptor.seat) == ("", None, "")
        with SharedMemory.create(4096, "test") as memory:
            source, target = named.register(memory), auto.register(memory)
            schedule(named, source, target.descriptor, np.arange(1))
            assert rig.end_of(named).kind is EventKind.DONE
            assert named.stats().local_bytes == 0


def test_auto_takes_the_nic_if_nobody_answers_at_the_seat() -> None:
    pair = rig.Pair("auto")
    elsewhere = msgspec.structs.replace(
        pair.remote.descriptor, local=msgspec.structs.replace(pair.remote.descriptor.local, seat="kvferry-elsewhere")
    )
    with TransferEngine("auto", incarnation=3) as other:
        region = other.register(memoryview(pair.source).cast("B"))
        schedule(other, region, elsewhere, np.arange(3))
        assert rig.end_of(other).kind is EventKind.DONE
        assert other.stats().local_bytes == 0
    pair.close()


@pytest.mark.parametrize("seat", ["kvferry-nobody", "", "dbus", "kvferry-" * 20])
def test_an_engine_that_is_not_there_is_said(sender, seat) -> None:
    with pytest.raises(FabricError, match=r"user answers at|is not an address"):
        sender.connect((seat,))


def test_memory_that_is_not_shared_cannot_be_written_to(sender) -> None:
    with TransferEngine("local", incarnation=2) as receiver:
        region = receiver.register(memoryview(bytearray(4096)))
        source = sender.register(memoryview(bytearray(4096)))
        with pytest.raises(FabricError, match="not shared"):
            schedule(sender, source, region.descriptor, np.arange(1))


def test_two_hosts_are_no_pair_over_shared_memory(sender, monkeypatch) -> None:
    here = sender.pairing
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert sender.pairing != here
    assert here.startswith("local@")
    with TransferEngine("tcp", incarnation=2) as tcp:
        assert tcp.pairing == "tcp"


def test_bytes_are_right_in_another_process(sender) -> None:
    memory = np.random.default_rng(3).integers(0, 256, 4 << 20, dtype=np.uint8)
    region = sender.register(memoryview(memory))
    with rig.receiver("local", memory.nbytes) as other:
        assert other.ask("expect 1 1 1024") == "armed"
        schedule(sender, region, other.descriptor, np.random.default_rng(4).permutation(1024))
        assert rig.end_of(sender).kind is EventKind.DONE
        assert other.ask("wait 15") == ["ARRIVED"]
        assert other.ask("hash") == xxhash.xxh3_64_hexdigest(memory)


def mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("kvferry-test")


def test_a_killed_receiver_fails_its_transfers_at_once_and_no_others(sender) -> None:
    gc.collect()  # what earlier tests have mapped
    before = mapped()
    counter = sender.new_counter()
    region = sender.register(memoryview(bytearray(1 << 20)))
    pages = np.arange(256)
    with rig.receiver("local", 1 << 20) as doomed, rig.receiver("local", 1 << 20) as healthy:
        schedule(sender, region, doomed.descriptor, pages)
        assert rig.end_of(sender).kind is EventKind.DONE
        transfer = schedule(sender, region, doomed.descriptor, pages, counter=counter, first_value=1)
        waiting = schedule(sender, region, healthy.descriptor, pages, counter=counter, first_value=1)
        doomed.kill()
        failed = rig.end_of(sender)  # it waits for a layer, and is told nevertheless
        assert (failed.kind, failed.transfer, failed.error) == (EventKind.FAILED, transfer, errno.ECONNRESET)
        assert failed.peer == doomed.descriptor.addresses[0]
        assert mapped() <= before
        healthy.ask("expect 1 1 256")
        counter.bump()
        done = rig.end_of(sender)
        assert (done.kind, done.transfer) == (EventKind.DONE, waiting)
        assert healthy.ask("wait 15") == ["ARRIVED"]
        with pytest.raises(FabricError, match="answers at"):
            schedule(sender, region, doomed.descriptor, pages)


def test_a_receiver_that_is_stopped_fails_the_transfer_once_its_ring_is_full(sender) -> None:
    region = sender.register(memoryview(bytearray(64 * 8192)))
    with rig.receiver("local", 64 * 8192) as other:
        schedule(sender, region, other.descriptor, np.arange(8), 64)
        assert rig.end_of(sender).kind is EventKind.DONE
        rig.stop(other.process)
        scattered = np.random.default_rng(1).permutation(8192)
        ends = []
        while EventKind.FAILED not in ends and len(ends) < 20:
            schedule(sender, region, other.descriptor, scattered, 64)
            ends.append((last := rig.end_of(sender)).kind)
        assert (last.error, "hangs or is stopped" in last.text) == (errno.ETIMEDOUT, True)
        waiting = schedule(sender, region, other.descriptor, scattered, 64)
        waiting.cancel()
        assert rig.end_of(sender).kind is EventKind.CANCELLED  # nothing is in flight, running or not
        other.process.send_signal(signal.SIGCONT)
        rig.until(lambda: other.ask("stats")["stale_immediates"] >= 4096, "the ring to be drained")
        other.ask("expect 1 2 8")
        schedule(sender, region, other.descriptor, np.arange(8), 64, generation=2)
        assert rig.end_of(sender).kind is EventKind.DONE
        assert other.ask("wait 15") == ["ARRIVED"]


WRITER = """
import json, sys
import numpy as np
from kvferry_fabric import ChunkSchedule, TransferEngine, runs
from kvferry_proto.memory import DomainMemory, MemoryDescriptor
engine = TransferEngine("local", incarnation=3)
source = np.full(64 << 20, 0xEE, np.uint8)
region = engine.register(memoryview(source))
for line in sys.stdin:
    fields = json.loads(line)
    fields["domains"] = tuple(DomainMemory(**domain) for domain in fields["domains"])
    remote = MemoryDescriptor(**fields)
    size, pages = 1 << 20, np.arange(remote.length >> 20)
    chunk = ChunkSchedule(
        counter=None, first_value=0, layers=1, region=region, peer=engine.connect(remote.addresses), remote=remote,
        slot=1, generation=1, source_layer_stride=0, destination_layer_stride=0, source_page_stride=size,
        destination_page_stride=size, length=size, runs=runs(pages, pages))
    waiting = [engine.schedule_layers(chunk) for _ in range(8)]
    print("writing", flush=True)
    while waiting:
        for event in engine.poll():
            waiting.remove(event.transfer)
            if event.error == 0:
                waiting.append(engine.schedule_layers(chunk))
    print(event.text, flush=True)
"""


class Writer:
    """A process that writes to whatever it is told of, without an end, until its key is closed."""

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", WRITER], stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)

    def line(self) -> str:
        return self.process.stdout.readline()

    def write_to(self, region) -> None:
        self.process.stdin.write(json.dumps(msgspec.to_builtins(region.descriptor)) + "\n")
        self.process.stdin.flush()
        assert self.line() == "writing\n"


@pytest.fixture
def pool() -> Iterator[tuple[TransferEngine, SharedMemory]]:
    with SharedMemory.create(64 << 20, "kvferry-test") as memory, TransferEngine("local", incarnation=2) as receiver:
        yield receiver, memory


def closes(region) -> bool:
    try:
        region.close()
    except FabricError as error:
        if error.code != errno.EAGAIN:
            raise
        return False
    return True


def stopped_in_the_middle(receiver: TransferEngine, memory: SharedMemory, writer: Writer):
    """Stop the writer in the middle of a copy; the region then cannot be closed. It copies nearly all the time."""
    for _ in range(20):
        region = receiver.register(memory)
        writer.write_to(region)
        rig.until(lambda: receiver.stats().stale_immediates > 0, "the writer to write")
        rig.stop(writer.process)
        if not closes(region):
            return region
        writer.process.send_signal(signal.SIGCONT)
        assert "closed the memory key" in writer.line()
    pytest.fail("the writer was never caught while copying")


def test_a_key_is_not_closed_while_its_stopped_holder_may_write_on(pool) -> None:
    receiver, memory = pool
    with Writer() as writer:
        region = stopped_in_the_middle(receiver, memory, writer)
        everything = np.frombuffer(memory.buffer, np.uint8)
        everything[:] = 0
        with pytest.raises(FabricError, match="close it again later"):
            region.close()
        writer.process.send_signal(signal.SIGCONT)
        rig.until(lambda: closes(region), "the writer to end its piece")
        late = np.flatnonzero(everything)
        assert late.size == 0 or late[-1] - late[0] < PIECE
        everything[:] = 0
        assert "closed the memory key" in writer.line()
        assert not everything.any(), "bytes landed after the key was closed"
        del everything


def test_a_key_is_closed_once_its_stopped_holder_is_dead(pool) -> None:
    receiver, memory = pool
    with Writer() as writer:
        region = stopped_in_the_middle(receiver, memory, writer)
        writer.process.kill()
        rig.until(lambda: closes(region), "the writer's end to be noticed")


def test_senders_killed_while_writing_leave_nothing(sender) -> None:
    with rig.receiver("local", 4 << 20) as other:
        fds = open_fds(other.process)
        for _ in range(2):
            with Writer() as writer:
                writer.process.stdin.write(json.dumps(msgspec.to_builtins(other.descriptor)) + "\n")
                writer.process.stdin.flush()
                assert writer.line() == "writing\n"
                rig.until(lambda: "kvferry-board" in memory_of(other.process), "the writer to be admitted")
        rig.until(lambda: "kvferry-board" not in memory_of(other.process), "the writers' ends to be noticed")
        assert open_fds(other.process) == fds
        region = sender.register(memoryview(bytearray(4 << 20)))
        other.ask("expect 1 2 5")
        schedule(sender, region, other.descriptor, np.arange(5), generation=2)
        assert rig.end_of(sender).kind is EventKind.DONE
        assert other.ask("wait 15") == ["ARRIVED"]


def test_a_stranger_at_the_seat_is_not_listened_to(sender) -> None:
    with rig.receiver("local", 1 << 20) as other:
        fds = open_fds(other.process)
        words = (b"", b"hello", os.urandom(40), b"1lvk" + bytes(36), b"1lvk\1" + bytes(35))
        for word, passed in itertools.product(words, (1, 2, 3)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect("\0" + other.descriptor.addresses[0])
                with Path("/dev/null").open(encoding="ascii") as null:
                    socket.send_fds(stranger, [word or b"\0"], [null.fileno()] * passed)
        region = sender.register(memoryview(bytearray(1 << 20)))
        other.ask("expect 1 1 5")
        schedule(sender, region, other.descriptor, np.arange(5))
        assert rig.end_of(sender).kind is EventKind.DONE
        assert other.ask("wait 15") == ["ARRIVED"]
        sender.close()
        rig.until(lambda: open_fds(other.process) == fds, "the strangers' ends to be closed")


def test_a_page_larger_than_a_piece_leaves_turns_to_others(sender) -> None:
    """A small transfer that starts behind a page of 64 MiB is over before it."""
    large = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
    small = np.random.default_rng(2).integers(0, 256, 4096, dtype=np.uint8)
    counter = sender.new_counter()
    with (
        TransferEngine("local", incarnation=2) as receiver,
        SharedMemory.create(large.nbytes, "test") as first,
        SharedMemory.create(small.nbytes, "test") as second,
    ):
        regions = receiver.register(first), receiver.register(second)
        sources = sender.register(memoryview(large)), sender.register(memoryview(small))
        receiver.expect(1, 1, 1)
        receiver.expect(2, 1, 1)
        page = large.nbytes
        behind = {"counter": counter, "first_value": 1}
        slow = schedule(sender, sources[0], regions[0].descriptor, np.arange(1), page, **behind)
        quick = schedule(sender, sources[1], regions[1].descriptor, np.arange(1), slot=2, **behind)
        counter.bump()
        assert [event.transfer for event in rig.take(sender, rig.ENDS, 2)] == [quick, slow]
        assert {event.pages for event in rig.take(receiver, {EventKind.ARRIVED}, 2)} == {1}
        assert first.buffer == memoryview(large)
        assert second.buffer == memoryview(small)
        receiver.close()
