"""The idle check: what nobody will give back is a leak, what a step or a peer still holds is none."""

import asyncio
from types import SimpleNamespace

from kvferry_engine.prefix_cache import PrefixCache
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_engine.worker_node import WorkerNode
from kvferry_node.logs import get_logger
from prometheus_client import CollectorRegistry


async def leaks_after_looks(service, looks=4):
    """How many alarms so many looks at an idle node raise."""
    registry, looked = CollectorRegistry(), asyncio.Semaphore(0)
    node = SimpleNamespace(
        settings=SimpleNamespace(idle_check_seconds=0),
        worker_metrics=WorkerMetrics(registry, lambda: None),
        _log=get_logger(),
    )
    worker = SimpleNamespace(allocator=SimpleNamespace(check=looked.release))
    watching = asyncio.ensure_future(WorkerNode._watch(node, worker, service))
    for _ in range(looks):
        await looked.acquire()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return registry.get_sample_value("kvferry_idle_leaks_total")


async def test_pages_that_nobody_will_give_back_are_a_leak_at_the_second_look():
    book = PrefixCache(4)
    book.allocate(2)
    service = SimpleNamespace(held=lambda: {"requests": 0, "held_pages": book.held_pages}, under_way=lambda: False)
    assert await leaks_after_looks(service) == 3


async def test_pages_of_a_request_that_has_ended_within_a_slow_step_are_no_leak():
    service = SimpleNamespace(held=lambda: {"requests": 0, "leaving": 1, "held_pages": 44}, under_way=lambda: True)
    assert await leaks_after_looks(service) == 0
