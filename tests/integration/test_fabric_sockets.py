"""What the fabric asks of the connections that libfabric makes over sockets."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import fabric_rig as rig
import numpy as np
import pytest
from fabric_rig import schedule
from kvferry_fabric import EventKind, TransferEngine

SIZE = 1 << 20
DATA_SEGMENTS_OUT = 156
"""Where struct tcp_info (linux/tcp.h) has the number of segments with data that were sent, 4 bytes."""


def connections(port: int) -> Iterator[socket.socket]:
    """Copies of this process's sockets that are connected to a port."""
    for path in Path("/proc/self/fd").iterdir():
        try:
            if not path.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as copy:
                if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                    yield copy
        except OSError:  # closed meanwhile, or not connected
            continue


def port_of(address: str) -> int:
    """Of a struct sockaddr_in in hex."""
    return int.from_bytes(bytes.fromhex(address)[2:4], "big")


@pytest.mark.skipif(not rig.BIND.startswith("127."), reason="needs a connection that stays on this host")
@pytest.mark.parametrize("provider", ["tcp", "net"])
def test_what_stays_on_the_host_is_not_paced(provider) -> None:
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_bytes().strip()
    with rig.receiver(provider, SIZE) as other, TransferEngine(provider, incarnation=1, bind=rig.BIND) as engine:
        region, remote = engine.register(memoryview(bytearray(SIZE))), other.descriptor
        for _ in range(2):
            schedule(engine, region, remote, np.arange(5))
            assert rig.end_of(engine).kind is EventKind.DONE
            ways = [
                one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                for one in connections(port_of(remote.addresses[0]))
            ]
            assert [name.strip(b"\0") for name in ways] == [b"reno"], default
            engine.forget(remote.addresses, remote.seat)


@pytest.mark.skipif(not rig.BIND.startswith("127."), reason="needs a connection that stays on this host")
@pytest.mark.parametrize("provider", ["tcp", "net"])
def test_a_connection_after_one_that_was_lost_idle_is_not_paced_either(provider) -> None:
    """Nothing was in flight, so that no write's error tells of the loss."""
    options = {"incarnation": 1, "bind": rig.BIND}
    with rig.receiver(provider, SIZE) as other, TransferEngine(provider, **options) as engine:
        region, remote = engine.register(memoryview(bytearray(SIZE))), other.descriptor
        port = port_of(remote.addresses[0])
        ways = []
        for _ in range(2):
            schedule(engine, region, remote, np.arange(3))
            assert rig.end_of(engine).kind is EventKind.DONE
            for one in connections(port):
                ways.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b"\0"))
                one.shutdown(socket.SHUT_RDWR)
                one.close()
            rig.until(lambda: not list(connections(port)), "the connection to be closed")
        assert ways == [b"reno"] * 2


def segments_sent(remote) -> int:
    """With data, over this process's connection to an engine."""
    (info,) = [
        one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DATA_SEGMENTS_OUT + 4)
        for one in connections(port_of(remote.addresses[0]))
    ]
    return int.from_bytes(info[DATA_SEGMENTS_OUT:], sys.byteorder)


@pytest.mark.skipif(not rig.BIND.startswith("127."), reason="needs loopback's segments of 64 KiB")
@pytest.mark.parametrize("provider", ["tcp", "net"])
def test_writes_of_a_turn_leave_in_full_segments_and_nothing_is_kept_behind(provider) -> None:
    options = {"incarnation": 1, "bind": rig.BIND, "gather": 1}
    with rig.receiver(provider, SIZE) as other, TransferEngine(provider, **options) as engine:
        region, remote = engine.register(memoryview(bytearray(SIZE))), other.descriptor
        schedule(engine, region, remote, np.arange(1))
        assert rig.end_of(engine).kind is EventKind.DONE
        before = segments_sent(remote)
        schedule(engine, region, remote, np.arange(0, 256, 2))
        done = rig.end_of(engine)
        assert (done.kind, done.writes) == (EventKind.DONE, 128)
        assert segments_sent(remote) - before <= done.writes / 8
        held = connections(port_of(remote.addresses[0]))
        assert [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) for one in held] == [0]
