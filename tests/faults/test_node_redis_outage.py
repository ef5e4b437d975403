"""Redis stopped, hung, flushed: nodes come back by themselves, views keep what they saw, nobody is declared gone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kvferry_node.placement import PlacementAsk, Placer
from kvferry_node.registry import MembershipView, Registry
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role, new_incarnation

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("nothing_left")]

LEASE = 2.0
"""Seconds: a busy machine must not let a living node's lease end."""


class Cluster:
    """Two nodes, a view and a placer."""

    def __init__(self, url: str) -> None:
        self.events: list[tuple[str, str]] = []
        self.registries = [
            Registry(url, "t", _record(node_id), lease_seconds=LEASE, heartbeat_seconds=0.2) for node_id in ("d1", "d2")
        ]
        self.view = MembershipView(
            url,
            "t",
            on_join=lambda record: self.events.append(("join", record.ref.id)),
            on_leave=lambda record: self.events.append(("leave", record.ref.id)),
            grace_seconds=LEASE,
        )
        self.placer = Placer(url, "t", self.view)
        self.admitted: list[str] = []
        self.asked = 0

    async def place(self) -> str:
        self.asked += 1
        ask = PlacementAsk(request_id=f"r{self.asked}", tokens=1, pages=1, model="m")
        return (await self.placer.place(ask)).decoder.ref.id

    def counted(self, way: str) -> float:
        labels = {"way": way, "outcome": "placed"}
        return self.placer._metrics.registry.get_sample_value("kvferry_placements_total", labels) or 0.0

    def take_admitted(self) -> list[str]:
        admitted, self.admitted = self.admitted, []
        return admitted


def _record(node_id: str) -> NodeRecord:
    ref = NodeRef(node_id, new_incarnation())
    return NodeRecord(ref=ref, role=Role.DECODER, endpoint="tcp://127.0.0.1:1", model="m", total_pages=100)


@pytest.fixture
async def cluster(redis_server: Any, eventually: Any) -> AsyncIterator[Cluster]:
    it = Cluster(redis_server.url)
    tasks = [asyncio.create_task(it.view.run())]
    for registry in it.registries:
        await registry.join()
        tasks.append(asyncio.create_task(registry.run(lambda: Load(free_pages=100), it.take_admitted)))
    await eventually(lambda: len(it.view.nodes) == 2 and it.view.load("d2").free_pages)
    yield it
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for registry in it.registries:
        await registry.close()
    await it.placer.close()
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results


def present(redis_server: Any) -> int:
    with contextlib.suppress(Exception):
        return sum(int(redis_server.command("EXISTS", f"t:node:{node_id}")) for node_id in ("d1", "d2"))
    return 0


async def test_flushed_redis_is_filled_again_and_nobody_is_lost(cluster, redis_server, eventually):
    # A heartbeat may come in between: then there is something in Redis again, and it is flushed anew.
    while not cluster.counted("local"):
        redis_server.command("FLUSHALL")
        redis_server.command("SCRIPT", "FLUSH")
        assert await cluster.place() in {"d1", "d2"}
    await eventually(lambda: present(redis_server) == 2)
    await asyncio.sleep(2 * LEASE)
    assert cluster.events == [("join", "d1"), ("join", "d2")]
    assert await cluster.place() in {"d1", "d2"}


async def test_stopped_redis(cluster, redis_server, eventually):
    redis_server.stop()
    await eventually(lambda: not cluster.view.available)
    # Longer than the leases: had the clock of the leases gone on, all would be gone.
    for _ in range(6):
        assert await cluster.place() in {"d1", "d2"}
        await asyncio.sleep(LEASE / 3)
    assert cluster.counted("local") == 6
    assert set(cluster.view.nodes) == {"d1", "d2"}
    redis_server.start()
    await eventually(lambda: present(redis_server) == 2)
    await eventually(lambda: cluster.view.available)
    await asyncio.sleep(2 * LEASE)
    assert cluster.events == [("join", "d1"), ("join", "d2")]
    await cluster.place()
    assert cluster.counted("redis") == 1


async def test_hung_redis_whose_leases_all_end_meanwhile(cluster, redis_server, eventually):
    redis_server.pause()
    await eventually(lambda: not cluster.view.available)
    await asyncio.sleep(1.5 * LEASE)
    assert await cluster.place() in {"d1", "d2"}
    assert cluster.counted("local") == 1
    redis_server.resume()
    await eventually(lambda: present(redis_server) == 2)
    await eventually(lambda: cluster.view.available)
    await asyncio.sleep(2 * LEASE)
    assert cluster.events == [("join", "d1"), ("join", "d2")]


async def test_node_that_dies_while_redis_is_away_is_lost_afterwards(cluster, redis_server, eventually):
    dead = cluster.registries[0]
    redis_server.stop()
    await dead.leave()  # goes unheard
    await eventually(lambda: not cluster.view.available)
    redis_server.start()
    await eventually(lambda: ("leave", "d1") in cluster.events)
    assert cluster.events == [("join", "d1"), ("join", "d2"), ("leave", "d1")]


async def test_admitted_requests_are_remembered_through_an_outage(cluster, redis_server, eventually):
    cluster.registries[1]._lease_ms = 60_000
    decoder = await cluster.place()
    registry = next(registry for registry in cluster.registries if registry.record.ref.id == decoder)
    held = registry._keys[3]
    assert redis_server.command("HKEYS", held) == ["r1"]
    redis_server.pause()
    await eventually(lambda: not cluster.view.available)
    for each in cluster.registries:
        each._admitted.append("r1")
    redis_server.resume()
    await eventually(lambda: redis_server.command("HKEYS", held) == [])


async def test_join_waits_for_redis(redis_server, eventually):
    redis_server.stop()
    registry = Registry(redis_server.url, "t", _record("d1"))
    joining = asyncio.create_task(registry.join())
    await asyncio.sleep(0.4)
    assert not joining.done()
    redis_server.start()
    await asyncio.wait_for(joining, 10)
    assert redis_server.command("EXISTS", "t:node:d1") == 1
    await registry.close()
