"""What is done to the processes and links of a soak: each waits for what follows from it, and counts itself."""

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import fabric_rig as rig
import msgspec
from kvferry_fabric import TransferEngine
from kvferry_proto.memory import MemoryDescriptor

if TYPE_CHECKING:
    from fabric_soak import Soak


def kill_receiver(soak: "Soak") -> None:
    """kill -9 in the middle of a transfer; another takes its place."""
    index = soak.random.randrange(len(soak.receivers))
    doomed = soak.receivers[index]
    soak.fill(doomed)
    soak.killed.add(doomed)
    doomed.kill()
    doomed.close()
    rig.until(lambda: soak.none_left(doomed), "the transfers of a killed receiver")
    soak.receivers[index] = soak.new_receiver()
    soak.say({"killed": "receiver"})
    soak.counts["receivers_killed"] += 1


def cut(soak: "Soak") -> None:
    """A receiver takes nothing for a moment: its link is cut, for all that the sender can tell."""
    stopped, *others = soak.random.sample(soak.receivers, len(soak.receivers))
    process = stopped.process
    soak.start(stopped)
    rig.stop(process)
    soak.start(others[0])
    time.sleep(soak.random.uniform(0, 0.1))
    process.send_signal(signal.SIGCONT)
    soak.say({"cut": "receiver"})
    soak.counts["cuts"] += 1


def cut_link(soak: "Soak") -> None:
    """One of the two links is down for a moment: what is under way may fail."""
    assert soak.hosts is not None
    end, soak.link_is_cut = f"b{soak.random.choice('12')}", True
    soak.fill()
    soak.hosts.ip("b", "link", "set", end, "down")
    time.sleep(soak.random.uniform(0, 0.3))
    soak.start()
    soak.hosts.ip("b", "link", "set", end, "up")
    rig.until(lambda: all(soak.none_left(one) for one in soak.receivers), "the transfers of a cut link")
    soak.link_is_cut = False
    soak.say({"cut": "link"})
    soak.counts["link_cuts"] += 1


def kill_sender(soak: "Soak") -> None:
    """kill -9 of a process that writes into this one's memory."""
    descriptor = json.dumps(msgspec.to_builtins(soak.open_to_writers.descriptor))
    command = [sys.executable, __file__, descriptor]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
    soak.say({"killed": "sender"})
    soak.counts["senders_killed"] += 1


ANYWHERE = (kill_receiver, kill_receiver, cut, cut, kill_sender)
"""Twice as often: what is there twice."""
BETWEEN_HOSTS = (*ANYWHERE, cut_link, cut_link)


def write_until_killed(remote: MemoryDescriptor) -> None:
    """The other process of `kill_sender`."""
    with TransferEngine(remote.provider, incarnation=3, bind=rig.BIND) as engine:
        region = engine.register(memoryview(bytearray(remote.length)))
        peer, told = engine.connect(remote.addresses), False
        while True:
            engine.write(peer=peer, region=region, source_offset=0, remote=remote, destination_offset=0,
                         length=remote.length, slot=1, generation=1)  # fmt: skip
            rig.end_of(engine)
            if not told:
                print("writing", flush=True)  # noqa: T201 - the protocol
                told = True


if __name__ == "__main__":
    write_until_killed(msgspec.json.decode(sys.argv[1], type=MemoryDescriptor))
