"""What the fabric's tests share: a sender and a receiver with memory, and a receiver in another process."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from kvferry_fabric import ChunkSchedule, Event, EventKind, Fabric, SharedMemory, Transfer, TransferEngine, runs
from kvferry_fabric.in_memory import MemoryEngine, Network
from kvferry_proto.memory import MemoryDescriptor

ENDS = {EventKind.DONE, EventKind.CANCELLED, EventKind.FAILED}
# A machine with a NIC runs the same tests over it: KVFERRY_TEST_PROVIDERS=efa, KVFERRY_TEST_BIND=<address of the NIC>.
PROVIDERS = tuple(os.environ.get("KVFERRY_TEST_PROVIDERS", "tcp,net,shm,local").split(","))
OVER_NICS = tuple(name for name in PROVIDERS if name != "local")
"""Those where a write is in flight for a while."""
BIND = os.environ.get("KVFERRY_TEST_BIND", "127.0.0.1")


NOTHING: tuple[Counter[str], set[str]] = (Counter(), set())


def open_files(pid: int | str = "self") -> Counter[str]:
    """What the file descriptors of a process are open on, as "pipe", "socket" or a path, and how many each."""
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as the one by which the folder is read
            found[str(fd.readlink()).split(":[")[0]] += 1
    return found


class Held:
    """Open file descriptors and threads of this process, but for what is garbage, as of earlier tests."""

    def __init__(self) -> None:
        gc.collect()
        self.files = open_files()
        self.threads = {task.name for task in Path("/proc/self/task").iterdir()}

    def left_over(self) -> tuple[Counter[str], set[str]]:
        """What has come since. Libraries that an earlier test called may end threads of theirs meanwhile."""
        now = Held()
        return now.files - self.files, now.threads - self.threads


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition; a test's bound on waiting, not on speed."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out waiting for {what}"
        time.sleep(0.0005)


def stop(process: "subprocess.Popen[str]") -> None:
    """Stop a process, and wait until each of its threads has stopped: on a busy machine that takes a while."""
    process.send_signal(signal.SIGSTOP)

    def stopped() -> bool:
        try:
            stats = [stat.read_text() for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            return False
        return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}

    until(stopped, "every thread to stop")


def take(engine: Fabric, kinds: set[EventKind], count: int = 1, seconds: float = 60.0) -> list[Event]:
    """Poll until `count` events have come; all must be of the given kinds."""
    events: list[Event] = []

    def enough() -> bool:
        events.extend(engine.poll())
        return len(events) >= count

    until(enough, f"{count} events of {sorted(kinds)}", seconds)
    assert {event.kind for event in events} <= kinds, events
    return events


def end_of(engine: Fabric) -> Event:
    """The next transfer's end."""
    return take(engine, ENDS)[0]


def open_engine(provider: str, network: Network, incarnation: int, **options) -> Fabric:
    """An engine over libfabric, or over `network` if the provider is "memory"."""
    if provider == "memory":
        return MemoryEngine(network, incarnation=incarnation, trace=options.get("trace", False))
    return TransferEngine(provider, incarnation=incarnation, **{"bind": BIND, **options})


class Pair:
    """A sender and a receiver in this process, with memory shaped [layer][page][byte]; the sender's is random."""

    def __init__(
        self, provider: str, layers: int = 3, pages: int = 48, page: int = 4096, *, seed: int = 7,
        receiver: dict[str, Any] | None = None, **options
    ) -> None:  # fmt: skip
        self.layers, self.pages, self.page = layers, pages, page
        self.network = Network()
        self.sender = open_engine(provider, self.network, 1, **options)
        self.receiver = open_engine(provider, self.network, 2, **(receiver or {}))
        self.random = np.random.default_rng(seed)
        self.source = self.random.integers(0, 256, (layers, pages, page), dtype=np.uint8)
        self.memory = SharedMemory.create(self.source.nbytes, "kvferry-test")
        self.target = np.frombuffer(self.memory.buffer, np.uint8).reshape(layers, pages, page)
        self.target[:] = 0xA5
        self.region = self.sender.register(memoryview(self.source).cast("B"))
        self.remote = self.receiver.register(self.memory)
        self.peer = self.sender.connect(self.receiver.addresses, self.receiver.seat)
        self.counter = self.sender.new_counter()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.target = self.target.copy()  # the last view: the mapping goes with it
        self.memory.close()

    def permuted(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct random source and destination pages."""
        return self.random.permutation(self.pages)[:count], self.random.permutation(self.pages)[:count]

    def chunk(
        self, source: np.ndarray, target: np.ndarray, slot: int = 1, generation: int = 1, **changes
    ) -> ChunkSchedule:
        fields = {
            "counter": self.counter,
            "first_value": 1,
            "layers": self.layers,
            "region": self.region,
            "peer": self.peer,
            "remote": self.remote.descriptor,
            "slot": slot,
            "generation": generation,
            "source_layer_stride": self.pages * self.page,
            "destination_layer_stride": self.pages * self.page,
            "source_page_stride": self.page,
            "destination_page_stride": self.page,
            "length": self.page,
            "runs": runs(source, target),
        }
        return ChunkSchedule(**{**fields, **changes})

    def expected(self, source: np.ndarray, target: np.ndarray, layers: int | None = None) -> np.ndarray:
        """What the receiver's memory must hold once the first `layers` layers have come: gaps keep their bytes."""
        memory = np.full_like(self.target, 0xA5)
        memory[:layers, target] = self.source[:layers, source]
        return memory


def schedule(engine: TransferEngine, region, remote, pages: np.ndarray, page: int = 4096, **changes) -> Transfer:
    """Send `pages` of the region to the same places of `remote`."""
    fields = {
        "counter": None, "first_value": 0, "layers": 1, "region": region, "slot": 1, "generation": 1, "remote": remote,
        "source_layer_stride": 0, "destination_layer_stride": 0, "source_page_stride": page, "length": page,
        "destination_page_stride": page, "runs": runs(pages, pages),
    }  # fmt: skip
    if "peer" not in changes:
        fields["peer"] = engine.connect(remote.addresses, remote.seat)
    return engine.schedule_layers(ChunkSchedule(**{**fields, **changes}))


class Receiver:
    """The process of fabric_receiver.py."""

    def __init__(self, provider: str, size: int, domains: tuple[str, ...] = (), inside: tuple[str, ...] = ()) -> None:
        """Start it with a domain for each of `domains`; `inside` is a command to run it by."""
        script = Path(__file__).with_name("fabric_receiver.py")
        self.process = subprocess.Popen(
            [*inside, sys.executable, str(script), provider, str(size), *domains],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.descriptor = msgspec.json.decode(self._line(), type=MemoryDescriptor)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the receiver process ended"
        return line

    def ask(self, command: str):
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def receiver(
    provider: str, size: int, domains: tuple[str, ...] = (), inside: tuple[str, ...] = ()
) -> Iterator[Receiver]:
    process = Receiver(provider, size, domains, inside)
    try:
        yield process
    finally:
        process.close()
