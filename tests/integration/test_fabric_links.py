"""Two hosts, two links: one is cut in the middle of a transfer; a host vanishes without a word."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import fabric_rig as rig
import msgspec
import netns
import pytest
from netns import OURS, THEIRS

SIZE = 8 << 20
PAGES = SIZE // 4096
SCRIPT = Path(rig.__file__).with_name("fabric_sender.py")


@pytest.fixture(scope="module")
def hosts() -> Iterator[netns.Hosts]:
    with netns.hosts_if_possible() as made:
        if made is None:
            pytest.skip("network namespaces cannot be made here (root and iproute2 are needed)")
        yield made


class Sender:
    """fabric_sender.py on host a."""

    def __init__(self, hosts: netns.Hosts, provider: str, receiver: rig.Receiver, domains: tuple[str, ...]) -> None:
        command = [*hosts.inside("a"), sys.executable, str(SCRIPT), provider, str(SIZE), "1.5", *domains]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.meet(receiver)

    def meet(self, receiver: rig.Receiver) -> None:
        self.ask(f"meet {msgspec.json.encode(receiver.descriptor).decode()}")

    def ask(self, command: str):
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the sender process ended"
        return json.loads(line)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Rig:
    """A sender on one host, a receiver on the other."""

    def __init__(self, hosts: netns.Hosts, provider: str, receiver: rig.Receiver, domains: tuple[str, ...]) -> None:
        self.hosts, self.receiver = hosts, receiver
        self.sender = Sender(hosts, provider, receiver, domains)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()

    def transfer(self) -> list[str]:
        """Send all pages and return how that ended; DONE means that the bytes were compared."""
        self.sender.ask(f"send {PAGES} 1")
        ended = self.sender.ask("end")
        if ended[0] == "DONE":
            assert self.receiver.ask("hash") == self.sender.ask("hash")
        return ended

    def start_long(self) -> None:
        before = self.sender.ask("stats")["writes"]
        self.sender.ask(f"send {PAGES} 200")
        self.sender.ask(f"writes {before + 300}")

    def carried(self) -> list[int]:
        return [domain["bytes"] for domain in self.sender.ask("domains")]

    def out(self) -> list[int]:
        return [domain["out"] for domain in self.sender.ask("domains")]


@pytest.fixture(params=[("tcp", OURS, THEIRS), ("net", OURS, THEIRS), ("tcp", OURS[:1], THEIRS)], ids=str)
def hosts_apart(request: pytest.FixtureRequest, hosts: netns.Hosts) -> Iterator[Rig]:
    provider, ours, theirs = request.param
    with (
        rig.receiver(provider, SIZE, theirs, hosts.inside("b")) as receiver,
        Rig(hosts, provider, receiver, ours) as made,
    ):
        yield made


def test_a_link_cut_in_the_middle_fails_loudly_and_the_other_link_carries_on(hosts_apart) -> None:
    made = hosts_apart
    assert made.transfer()[0] == "DONE"
    made.start_long()
    made.hosts.ip("b", "link", "set", "b1", "down")
    try:
        kind, text = made.sender.ask("end")
        assert kind == "FAILED"
        assert "domain 0 (10.77.1.1) to fi_sockaddr_in://10.77." in text
        if len(made.carried()) == 1:
            return  # its only link is the one that was cut
        assert made.out() == [1, 0]
        before = made.carried()
        assert made.transfer()[0] == "DONE"
        after = made.carried()
        assert (after[0], after[1] - before[1]) == (before[0], SIZE), "all of it by the link that is left"
    finally:
        made.hosts.ip("b", "link", "set", "b1", "up")
    rig.until(lambda: made.transfer()[0] == "DONE" and made.carried()[0] > after[0], "the first link's return", 30)
    assert made.out() == [0, 0]
    assert made.sender.ask("stats")["in_flight_writes"] == 0


@pytest.mark.parametrize("provider", ["tcp", "net"])
def test_a_host_that_vanishes_fails_its_transfers_in_bounded_time_and_is_found_again(hosts, provider) -> None:
    with (
        rig.receiver(provider, SIZE, THEIRS[:1], hosts.inside("b")) as receiver,
        Rig(hosts, provider, receiver, OURS[:1]) as made,
    ):
        assert made.transfer()[0] == "DONE"
        made.start_long()
        hosts.ip("b", "route", "add", "blackhole", "10.77.1.1/32")
        try:
            assert made.sender.ask("end")[0] == "FAILED"  # TCP by itself would go on for a quarter of an hour
            left = subprocess.run([*hosts.inside("a"), "ss", "-tnH"], capture_output=True, text=True, check=True).stdout
            assert left == "", "nothing that the kernel could still send"
            assert made.transfer()[0] == "FAILED"
            assert made.sender.ask("stats")["active_transfers"] == 0
        finally:
            hosts.ip("b", "route", "del", "blackhole", "10.77.1.1/32")
        rig.until(lambda: made.transfer()[0] == "DONE", "the host's return", 30)


@pytest.mark.parametrize("provider", ["tcp", "net"])
def test_a_receiver_closes_its_end_of_a_connection_from_a_host_that_vanished(hosts, provider) -> None:
    """It never writes there, so that nothing but probes would tell."""
    impatient = (*hosts.inside("b"), "env", "KVFERRY_TEST_SILENCE=1")
    with (
        rig.receiver(provider, SIZE, THEIRS[:1], impatient) as receiver,
        Rig(hosts, provider, receiver, OURS[:1]) as made,
    ):
        assert made.transfer()[0] == "DONE"

        def accepted() -> int:
            command = [*hosts.inside("b"), "ss", "-tnH"]
            return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())

        def closed() -> bool:
            return accepted() == 0 and rig.open_files(receiver.process.pid)["socket"] == before - 1

        before = rig.open_files(receiver.process.pid)["socket"]
        assert accepted() == 1
        hosts.ip("a", "route", "add", "blackhole", "10.77.1.2/32")
        try:
            rig.until(closed, "the receiver's end to be closed", 30)
        finally:
            hosts.ip("a", "route", "del", "blackhole", "10.77.1.2/32")
        rig.until(lambda: made.transfer()[0] == "DONE", "the host's return", 30)


def test_a_peer_whose_first_nic_is_dead_from_the_start_is_written_to_by_the_other(hosts) -> None:
    hosts.ip("b", "route", "add", "blackhole", "10.77.1.1/32")
    try:
        with (
            rig.receiver("tcp", SIZE, THEIRS, hosts.inside("b")) as receiver,
            Rig(hosts, "tcp", receiver, OURS) as made,
        ):
            assert made.transfer()[0] == "DONE"
            assert made.carried() == [0, SIZE]
    finally:
        hosts.ip("b", "route", "del", "blackhole", "10.77.1.1/32")


def test_a_receiver_that_was_killed_and_is_back_at_the_same_address_works_at_once(hosts) -> None:
    one_port = ["sysctl", "-qw", "net.ipv4.ip_local_port_range=40000 40000"]
    subprocess.run([*hosts.inside("b"), *one_port], check=True, timeout=30)
    with rig.receiver("tcp", SIZE, THEIRS[:1], hosts.inside("b")) as first:
        made = Rig(hosts, "tcp", first, OURS[:1])
        assert made.transfer()[0] == "DONE"
        made.start_long()
        first.kill()
        assert made.sender.ask("end")[0] == "FAILED"
    with rig.receiver("tcp", SIZE, THEIRS[:1], hosts.inside("b")) as second:
        assert second.descriptor.addresses == first.descriptor.addresses
        made.receiver = second
        made.sender.meet(second)
        assert made.transfer()[0] == "DONE"
        assert made.sender.ask("stats")["peers"] == 1
        made.sender.close()
