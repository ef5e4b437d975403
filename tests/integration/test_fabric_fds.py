"""A process that runs out of file descriptors: it is told so, loses none, and goes on when there are some again."""

import resource
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import fabric_rig as rig
import numpy as np
import pytest
from fabric_rig import schedule
from kvferry_fabric import EventKind, TransferEngine

OPENING = """
import os, resource, sys
sys.path.insert(0, sys.argv[2])
from kvferry_fabric import FabricError, TransferEngine
from fabric_rig import NOTHING, Held

provider, most = sys.argv[1], resource.getrlimit(resource.RLIMIT_NOFILE)
with TransferEngine(provider, incarnation=0):
    pass  # what libfabric keeps for the process is opened once
held = {int(name) for name in os.listdir("/proc/self/fd")}
while os.open("/dev/null", os.O_RDONLY) <= max(held):
    pass  # below the limits to come no number is free
first = len(os.listdir("/proc/self/fd")) - 1
before = Held()
for room in range(100):
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + room, most[1]))
    try:
        TransferEngine(provider, incarnation=1).close()
    except FabricError as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        assert str(error).startswith("cannot open"), error
        assert before.left_over() == NOTHING, (room, error)
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        print(room)
        break
"""


@pytest.mark.parametrize("provider", ["tcp", "net", "local", "auto"])
def test_an_engine_that_cannot_be_opened_leaves_nothing(provider) -> None:
    command = [sys.executable, "-c", OPENING, provider, str(Path(rig.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 3


def test_a_receiver_without_descriptors_turns_callers_away_until_it_has_some() -> None:
    with rig.receiver("local", 4096) as other, TransferEngine("local", incarnation=1) as sender:
        region, pid = sender.register(memoryview(bytearray(4096))), other.process.pid
        most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, most[1]))
        for _ in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
                caller.settimeout(15)
                caller.connect("\0" + other.descriptor.addresses[0])
                assert caller.recv(1) == b""
        rig.until(lambda: other.ask("stats")["errors"] == 2, "both to be counted")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, most)
        other.ask("expect 1 1 1")
        schedule(sender, region, other.descriptor, np.arange(1))
        assert rig.end_of(sender).kind is EventKind.DONE
        assert other.ask("wait 15") == ["ARRIVED"]


@pytest.mark.parametrize("provider", ["tcp", "net"])
def test_callers_whom_nobody_has_answered_are_hung_up_on_at_the_end(provider) -> None:
    """libfabric forgets their sockets: a stranger's, and that of a peer who called at the last moment."""
    with TransferEngine(provider, incarnation=0):
        pass
    before, callers = rig.Held(), []
    for _ in range(5):
        with TransferEngine(provider, incarnation=1, bind="127.0.0.1") as engine:
            port = int.from_bytes(bytes.fromhex(engine.addresses[0])[2:4], "big")
            callers.append(socket.create_connection(("127.0.0.1", port)))
    for caller in callers:
        caller.settimeout(30)
        with caller, suppress(ConnectionResetError):
            assert caller.recv(1) == b""
    assert before.left_over() == rig.NOTHING
