"""Large schedules: what registering many pages costs, and how many writes pages take when pools are fragmented."""

import ctypes
import time
from typing import Any

import numpy as np
from kvferry_engine.allocator import PageAllocator
from kvferry_fabric import runs

from fabric_bench.latency import Sender
from fabric_bench.receiver import Receiver, wait_events


class _Heap(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def heap_bytes() -> int:
    """Memory that this process has allocated in C."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Heap
    now = mallinfo()
    return int(now.uordblks + now.hblkhd)


def measure_registration(provider: str, pages: int = 100_000, page: int = 1024) -> dict[str, Any]:
    """One chunk of scattered pages that waits for its counter: time of the call, memory held, time until cancelled."""
    receiver = Receiver(provider, pages * page)
    sender = Sender(receiver, pages * page)
    counter = sender.engine.new_counter()
    random = np.random.default_rng(3)
    source, target = random.permutation(pages), random.permutation(pages)
    try:
        start = time.monotonic_ns()
        table = runs(source, target)
        merged = time.monotonic_ns()
        chunk = sender.chunk(table, page, counter=counter, first_value=1)
        before = heap_bytes()
        called = time.monotonic_ns()
        transfer = sender.engine.schedule_layers(chunk)
        registered = time.monotonic_ns()
        held = heap_bytes() - before
        transfer.cancel()
        wait_events(sender.engine)
    finally:
        sender.engine.close()
        receiver.close()
    return {
        "bench": "fabric-registration",
        "provider": provider,
        "pages": pages,
        "runs_ms": round((merged - start) / 1e6, 3),
        "schedule_ms": round((registered - called) / 1e6, 3),
        "bytes_per_page": round(held / pages, 1),
    }


def churned(pages: int, occupied: float, seed: int) -> PageAllocator:
    """A pool in which requests of 1 to 64 pages have come and gone until so much of it is taken."""
    random, pool, held = np.random.default_rng(seed), PageAllocator(pages), []
    for _ in range(20 * pages // 32):
        count = int(random.integers(1, 65))
        while held and pages - pool.free_pages + count > occupied * pages:
            pool.free(held.pop(int(random.integers(len(held)))))
        held.append(pool.allocate(count))
    return pool


def measure_fragmentation(provider: str, occupied: float, pages: int = 4096, page: int = 4096) -> dict[str, Any]:
    """Writes per page for requests of 64 pages between two pools of which so much is taken."""
    receiver = Receiver(provider, pages * page)
    results = {}
    for name, gather in (("merged", 1), ("merged_vectors", 0)):
        sender = Sender(receiver, pages * page, gather=gather)
        source, target = churned(pages, occupied, 1), churned(pages, occupied, 2)
        writes = moved = 0
        while min(source.free_pages, target.free_pages) >= 64 and moved < 1024:
            sender.engine.schedule_layers(sender.chunk(runs(source.allocate(64), target.allocate(64)), page))
            done = sender.done()
            writes, moved = writes + done.writes, moved + done.pages
        results[name] = round(writes / moved, 4)
        sender.engine.close()
    receiver.close()
    return {
        "bench": "fabric-fragmentation",
        "provider": provider,
        "page_bytes": page,
        "occupied": occupied,
        "ops_per_page_one_each": 1.0,
        "ops_per_page_merged": results["merged"],
        "ops_per_page": results["merged_vectors"],
    }
