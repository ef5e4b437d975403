"""Transfers for a while, with receivers and senders killed, stopped, cut off and cancelled at random: `make soak`.

One engine in this process sends to receivers in processes of their own, and is itself written to by other processes.
Over tcp and net, where network namespaces can be made, the receivers are on another host with two links, of which one
is cut now and then.
Every transfer must end: done, cancelled, or failed with a reason; every byte of those that are done is verified at the
receiver; at the end nothing is held. Prints one line of JSON for whatever is done to a process, and a last one with the
sums; raises AssertionError if something does not hold. The test suite runs the same for a few seconds.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import fabric_chaos as chaos
import fabric_rig as rig
import netns
import numpy as np
import xxhash
from kvferry_fabric import ChunkSchedule, Event, EventKind, SharedMemory, TransferEngine, runs

HELD = ("armed_slots", "active_transfers", "held_transfers", "in_flight_writes", "regions", "peers", "counters")
SLOTS, SLOT_PAGES, PAGE = 4, 64, 16384
GENERATIONS = 1024
OVER_LINKS = {"tcp", "net"}
SILENCE = 4.0
"""A link that is up again may be silent for 3 s more: ARP asks again after 1 s, and TCP, in doubling steps, by 3 s."""


@dataclass
class Job:
    """A transfer under way."""

    receiver: "rig.Receiver"
    slot: int
    generation: int
    source: np.ndarray
    target: np.ndarray


class Soak:
    """The sender, its receivers, and what has happened so far."""

    def __init__(
        self, provider: str, seed: int, say: Callable[[dict[str, Any]], None], hosts: netns.Hosts | None = None
    ) -> None:
        """With `hosts`, the sender is on "a", where the caller has entered, and the receivers on "b"."""
        self.provider, self.say, self.hosts = provider, say, hosts
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.verified_bytes = 0
        self.pages = SLOTS * SLOT_PAGES
        self.memory = np.random.default_rng(seed).integers(0, 256, (self.pages, PAGE), dtype=np.uint8)
        domains = netns.OURS if hosts else (rig.BIND,)
        self.engine = TransferEngine(provider, incarnation=1, domains=domains, silence_seconds=SILENCE)
        self.region = self.engine.register(memoryview(self.memory).cast("B"))
        self.victim = SharedMemory.create(1 << 22, "kvferry-soak")
        self.open_to_writers = self.engine.register(self.victim)
        self.receivers = [self.new_receiver() for _ in range(2)]
        self.generation = 0
        self.live: dict[int, Job] = {}
        self.killed: set[rig.Receiver] = set()
        self.link_is_cut = False

    def new_receiver(self) -> "rig.Receiver":
        """Another process to send to."""
        if self.hosts is None:
            return rig.Receiver(self.provider, self.pages * PAGE)
        return rig.Receiver(self.provider, self.pages * PAGE, netns.THEIRS, self.hosts.inside("b"))

    def start(self, receiver: "rig.Receiver | None" = None) -> None:
        """One transfer to a slot that is at rest; a page of a slot belongs to it alone. Some are called off at once."""
        receiver = receiver or self.random.choice(self.receivers)
        taken = {job.slot for job in self.live.values() if job.receiver is receiver}
        slots = [slot for slot in range(SLOTS) if slot not in taken]
        if not slots:
            return
        slot, count = self.random.choice(slots), self.random.randint(1, SLOT_PAGES)
        self.generation = (self.generation + 1) % GENERATIONS
        source = np.array(self.random.sample(range(self.pages), count))
        target = slot * SLOT_PAGES + np.array(self.random.sample(range(SLOT_PAGES), count))
        assert receiver.ask(f"expect {slot} {self.generation} {count}") == "armed"
        with self.engine.connect(receiver.descriptor.addresses) as peer:
            transfer = self.engine.schedule_layers(
                ChunkSchedule(
                    counter=None, first_value=0, layers=1, region=self.region, peer=peer, remote=receiver.descriptor,
                    slot=slot, generation=self.generation, source_layer_stride=0, destination_layer_stride=0,
                    source_page_stride=PAGE, destination_page_stride=PAGE, length=PAGE, runs=runs(source, target),
                )
            )  # fmt: skip
        self.live[transfer] = Job(receiver, slot, self.generation, source, target)
        self.counts["started"] += 1
        if self.random.random() < 0.2:
            transfer.cancel()

    def fill(self, receiver: "rig.Receiver | None" = None) -> None:
        """As many transfers as one receiver has slots."""
        for _ in range(SLOTS):
            self.start(receiver)

    def look(self) -> None:
        """Take the ends of transfers."""
        for event in self.engine.poll():
            self.end(event, self.live.pop(event.transfer))

    def end(self, event: Event, job: Job) -> None:
        """Verify what is said to be done; what has failed must have a reason."""
        self.counts[event.kind.name.lower()] += 1
        if event.kind is EventKind.FAILED:
            assert event.text, event
            assert event.peer == job.receiver.descriptor.addresses[0], event
            assert job.receiver in self.killed or self.link_is_cut or "could not be posted" in event.text, event
            self.reasons[event.text.split(":")[0][:60]] += 1
        if job.receiver in self.killed:
            return
        if event.kind is EventKind.DONE:
            pages = " ".join(map(str, job.target))
            want = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.memory[job.source]))
            assert job.receiver.ask(f"pages {job.slot} {job.target.size} {PAGE} {pages}") == want, event
            self.verified_bytes += job.target.size * PAGE
        assert job.receiver.ask(f"disarm {job.slot} {job.generation}") is True

    def cancel(self) -> None:
        """Call one transfer off."""
        if self.live:
            self.random.choice(list(self.live)).cancel()

    def refuse(self) -> None:
        """The provider refuses one of the next writes."""
        self.engine.fault("fail", self.random.randint(1, 50))

    def none_left(self, receiver: "rig.Receiver") -> bool:
        """Whether its transfers have all ended."""
        self.look()
        return not any(job.receiver is receiver for job in self.live.values())

    def step(self, since_chaos: float) -> bool:
        """Go on a little; now and then something is done to a process. Returns whether something was."""
        for _ in range(self.random.randint(1, 4)):
            self.start()
        if self.random.random() < 0.3:
            self.cancel()
        if self.random.random() < 0.1:
            self.refuse()
        self.look()
        if since_chaos < 0.5:
            return False
        self.random.choice(chaos.BETWEEN_HOSTS if self.hosts else chaos.ANYWHERE)(self)
        return True

    def finish(self) -> dict[str, Any]:
        """Cancel what is left, and see that nothing is held. Returns the sums."""
        self.engine.fault("fail", 0)
        for transfer in self.live:
            transfer.cancel()
        rig.until(lambda: all(self.none_left(one) for one in self.receivers), "the last transfers")
        for receiver in self.receivers:
            stats = receiver.ask("stats")
            assert (stats["armed_slots"], stats["active_transfers"]) == (0, 0), stats
        self.region.close()
        self.open_to_writers.close()
        stats = self.engine.stats()._asdict()
        assert not any(stats[name] for name in HELD), stats
        ends = sum(self.counts[kind.name.lower()] for kind in rig.ENDS)
        assert ends == self.counts["started"], self.counts
        return {"bench": "soak", "provider": self.provider, **self.counts, "verified_bytes": self.verified_bytes,
                "reasons": dict(self.reasons)}  # fmt: skip

    def close(self) -> None:
        """End every process."""
        for receiver in self.receivers:
            receiver.close()
        self.engine.close()
        self.victim.close()


def soak(provider: str, seconds: float, seed: int, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run for so many seconds. Returns the sums; raises AssertionError if something does not hold."""
    with TransferEngine(provider, incarnation=0, bind=rig.BIND):
        pass  # what libfabric keeps for the process is opened once
    before = rig.Held()
    with ExitStack() as stack:
        hosts = stack.enter_context(netns.hosts_if_possible()) if provider in OVER_LINKS else None
        if hosts is not None:
            stack.enter_context(hosts.entered("a"))
        run = Soak(provider, seed, say, hosts)
        stack.callback(run.close)
        end, last = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < end:
            if run.step(time.monotonic() - last):
                last = time.monotonic()
        sums = run.finish()
    assert before.left_over() == rig.NOTHING, "file descriptors and threads of this process"
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--provider", default="tcp")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    started = time.monotonic()

    def say(line: dict[str, Any]) -> None:
        print(json.dumps({"second": round(time.monotonic() - started, 1), **line}), flush=True)  # noqa: T201 - what it is for

    say({"seed": options.seed})
    say(soak(options.provider, options.seconds, options.seed, say))


if __name__ == "__main__":
    main()
