"""Throughput: scattered pages, vectors and runs, against plain libfabric, or plain memcpy, one page at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic_ns
from typing import Any

from kvferry_fabric import ChunkSchedule, EventKind, TransferEngine, runs

from fabric_bench.raw import Copy, Limit, Raw
from fabric_bench.receiver import SLOT, Receiver, random_memory, scattered, wait_events

DEPTH = 128
"""Writes that plain libfabric keeps in flight."""

CONNECTIONS = 3
"""Of each side in a case, one after the other: over sockets one may be half again as fast as the next."""


@dataclass(frozen=True)
class Case:
    """One row of the result."""

    page: int
    pattern: str
    vectors: bool

    @property
    def run(self) -> int:
        return 16 if self.pattern == "runs16" else 1


CASES = [
    *(Case(kib << 10, "scattered", vectors=False) for kib in (4, 16, 64, 256)),
    *(Case(kib << 10, "scattered", vectors=True) for kib in (4, 16, 64)),
    Case(4 << 10, "runs16", vectors=True),
]


class Ours:
    """A sender engine in this process and its pages in the receiver's."""

    def __init__(self, provider: str, receiver: Receiver, case: Case, size: int, **options: Any) -> None:  # noqa: ANN401
        self.receiver, self.case, self.pages = receiver, case, size // case.page
        self.memory = random_memory(size)
        self.runs = runs(*scattered(self.pages, case.run))
        self.engine = TransferEngine(provider, incarnation=1, gather=0 if case.vectors else 1, **options)
        self.region = self.engine.register(memoryview(self.memory))
        self.peer = self.engine.connect(receiver.descriptor.addresses, receiver.descriptor.seat)
        self.writes = 0

    def round(self) -> float:
        """Move every page once; seconds until both sides have seen the last completion."""
        generation = self.receiver.arm(self.pages)
        page = self.case.page
        chunk = ChunkSchedule(
            counter=None, first_value=0, layers=1, region=self.region, peer=self.peer, slot=SLOT,
            remote=self.receiver.descriptor, generation=generation, source_layer_stride=0, destination_layer_stride=0,
            source_page_stride=page, destination_page_stride=page, length=page, runs=self.runs,
        )  # fmt: skip
        start = monotonic_ns()
        self.engine.schedule_layers(chunk)
        done = wait_events(self.engine)[0]
        if done.kind is not EventKind.DONE:
            raise RuntimeError(done.text)
        self.writes = done.writes
        return (max(self.receiver.arrival_ns(), done.last_completion_ns) - start) / 1e9


@dataclass(frozen=True)
class Setting:
    """What all cases of a provider share."""

    program: Path
    provider: str
    size: int
    """Bytes that a round moves."""
    rounds: int


def limit(setting: Setting, case: Case) -> Limit:
    """What the case is held against: the same pages through plain libfabric, or on one host through memcpy."""
    pages = setting.size // case.page
    if setting.provider == "local":
        return Copy(setting.program, page=case.page, pages=pages)
    return Raw(setting.program, setting.provider, "stream", page=case.page, pages=pages, depth=DEPTH)


Turns = list[tuple[float, float, float]]
"""Seconds that ours took, the limit, and the limit once more."""


def in_turns(setting: Setting, receiver: Receiver, case: Case, rounds: int) -> tuple[Turns, float]:
    """New connections; bytes first, then rounds of each side in turns. Returns our writes per page too."""
    ours = Ours(setting.provider, receiver, case, setting.size)
    raw, again = limit(setting, case), limit(setting, case)
    try:
        ours.round()
        receiver.check(case.page, case.run, ours.pages)
        ours.round()
        turns = [(ours.round(), raw.round()["seconds"], again.round()["seconds"]) for _ in range(rounds)]
        return turns, ours.writes / ours.pages
    finally:
        raw.close()
        again.close()
        ours.engine.close()


def ratio(turns: Turns) -> float:
    """Of the medians."""
    our_seconds, raw_seconds, _ = (median(times) for times in zip(*turns, strict=True))
    return round(raw_seconds / our_seconds, 3)


def measure(setting: Setting, receiver: Receiver, case: Case) -> dict[str, Any]:
    """One case, over several connections of each side."""
    size, rounds = setting.size, -(-setting.rounds // CONNECTIONS)
    measured = [in_turns(setting, receiver, case, rounds) for _ in range(CONNECTIONS)]
    turns = [turn for of_connection, _ in measured for turn in of_connection]
    our_seconds, raw_seconds, again_seconds = (median(times) for times in zip(*turns, strict=True))
    return {
        "bench": "fabric-stream",
        "provider": setting.provider,
        "page_bytes": case.page,
        "pattern": case.pattern,
        "vectors": case.vectors,
        "ours_gbps": round(size / our_seconds / 1e9, 3),
        "raw_gbps": round(size / raw_seconds / 1e9, 3),
        "ratio": ratio(turns),
        "ratio_of_pairs": round(median(theirs / mine for mine, theirs, _ in turns), 3),
        "ratio_of_best": round(min(theirs for _, theirs, _ in turns) / min(mine for mine, _, _ in turns), 3),
        "ratio_of_connections": [ratio(of_connection) for of_connection, _ in measured],
        "raw_to_itself": round(raw_seconds / again_seconds, 3),
        "raw_to_itself_in_pairs": sorted(round(theirs / more, 2) for _, theirs, more in turns),
        "ops_per_page": round(measured[-1][1], 4),
        "verified_bytes": size * CONNECTIONS,
        "rounds": len(turns),
    }


def measure_all(setting: Setting, wanted: str) -> Iterator[dict[str, Any]]:
    """Every case of a provider whose name, as in "4096-scattered-vectors", contains `wanted`."""
    receiver = Receiver(setting.provider, setting.size)
    try:
        for case in CASES:
            if wanted in f"{case.page}-{case.pattern}{'-vectors' if case.vectors else ''}":
                yield measure(setting, receiver, case)
    finally:
        receiver.close()
