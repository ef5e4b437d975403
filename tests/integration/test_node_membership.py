"""Registry and MembershipView over a real Redis: joining, telling load, draining, leaving, taking over."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from kvferry_node.errors import NodeIdTaken
from kvferry_node.registry import MembershipView, Registry, pairing
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role, new_incarnation

pytestmark = pytest.mark.usefixtures("nothing_left")

LEASE = 2.0
"""Seconds: a busy machine must not let a living node's lease end."""


def record(node_id: str, role: Role = Role.DECODER, **fields: object) -> NodeRecord:
    ref = NodeRef(node_id, new_incarnation())
    return NodeRecord(ref=ref, role=role, endpoint="tcp://127.0.0.1:1", model="m", total_pages=100, **fields)


class Node:
    """A registry that beats until it is killed."""

    def __init__(self, url: str, what: NodeRecord, lease: float = LEASE, beat: float = 0.1) -> None:
        self.registry = Registry(url, "t", what, lease_seconds=lease, heartbeat_seconds=beat)
        self.load = Load(free_pages=100)
        self.admitted: list[str] = []
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> "Node":
        await self.registry.join()
        self.task = asyncio.create_task(self.registry.run(lambda: self.load, self._admitted))
        return self

    def _admitted(self) -> list[str]:
        admitted, self.admitted = self.admitted, []
        return admitted

    async def kill(self) -> None:
        """Die without a word."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.registry.close()


@contextlib.asynccontextmanager
async def watching(url: str, grace: float = LEASE) -> AsyncIterator[tuple[MembershipView, list[tuple[str, NodeRef]]]]:
    seen: list[tuple[str, NodeRef]] = []
    view = MembershipView(
        url,
        "t",
        on_join=lambda record: seen.append(("join", record.ref)),
        on_leave=lambda record: seen.append(("leave", record.ref)),
        grace_seconds=grace,
    )
    task = asyncio.create_task(view.run())
    try:
        yield view, seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_join_load_drain_leave(redis_server, eventually):
    async with watching(redis_server.url) as (view, seen):
        await view.synced.wait()
        what = record("d1")
        node = await Node(redis_server.url, what).start()
        await eventually(lambda: seen == [("join", what.ref)])
        assert view.nodes == {"d1": what}
        assert view.by_role(Role.DECODER) == [what]
        assert view.by_role(Role.PREFILLER) == []
        node.load = Load(free_pages=7, running=2, waiting=1, queued_tokens=1234)
        await eventually(lambda: view.load("d1") == node.load)
        await node.registry.set_draining()
        await eventually(lambda: view.nodes["d1"].draining)
        await node.registry.leave()
        await eventually(lambda: seen == [("join", what.ref), ("leave", what.ref)])
        assert view.nodes == {}
        assert view.load("d1") == Load()
        assert node.task is not None
        await node.task  # leaving ends the beat
        await node.kill()
        assert redis_server.command("KEYS", "*") == ["t:members"]


async def test_lease_of_a_killed_node_ends(redis_server, eventually):
    async with watching(redis_server.url) as (view, seen):
        node = await Node(redis_server.url, record("d1")).start()
        other = await Node(redis_server.url, record("d2")).start()
        await eventually(lambda: len(view.nodes) == 2)
        await node.kill()
        await eventually(lambda: ("leave", node.registry.record.ref) in seen)
        assert set(view.nodes) == {"d2"}
        await other.kill()


async def test_all_views_hear_of_a_lost_node_once(redis_server, eventually):
    async with watching(redis_server.url) as (_, first), watching(redis_server.url) as (_, second):
        node = await Node(redis_server.url, record("d1")).start()
        await eventually(lambda: len(first) == len(second) == 1)
        await node.kill()
        await eventually(lambda: len(first) == len(second) == 2)
        await asyncio.sleep(1.0)
        assert len(first) == len(second) == 2


async def test_restarted_node_leaves_as_the_old_and_joins_as_the_new(redis_server, eventually):
    async with watching(redis_server.url) as (view, seen):
        old = await Node(redis_server.url, record("d1"), lease=30).start()
        await eventually(lambda: len(seen) == 1)
        await old.kill()
        new = await Node(redis_server.url, record("d1"), lease=30).start()
        refs = old.registry.record.ref, new.registry.record.ref
        await eventually(lambda: seen == [("join", refs[0]), ("leave", refs[0]), ("join", refs[1])])
        assert view.nodes["d1"].ref == refs[1]
        await new.kill()


async def test_the_newest_of_two_processes_with_one_id_keeps_it(redis_server):
    old = await Node(redis_server.url, record("d1")).start()
    new = await Node(redis_server.url, record("d1")).start()
    assert old.task is not None
    with pytest.raises(NodeIdTaken, match="--node-id"):
        await old.task
    await old.registry.leave()  # takes only its own life out
    assert redis_server.command("HGET", "t:nodes", "d1") == f"{new.registry.record.ref.incarnation:x}"
    await old.kill()
    await new.kill()


async def test_a_node_that_has_not_told_its_load_has_none(redis_server, eventually):
    node = Node(redis_server.url, record("d1"))
    await node.registry.join()
    async with watching(redis_server.url) as (view, _):
        await eventually(lambda: "d1" in view.nodes)
        assert view.load("d1") == Load()
    await node.registry.close()


async def test_unreadable_record_hides_one_node_and_no_other(redis_server, eventually):
    node = await Node(redis_server.url, record("d1")).start()
    redis_server.command("HSET", "t:nodes", "bad", "1")
    redis_server.command("HSET", "t:node:bad", "record", "{", "free_pages", "x")
    async with watching(redis_server.url) as (view, _):
        await eventually(lambda: set(view.nodes) == {"d1"})
    await node.kill()


def test_pairing_tells_what_must_be_equal():
    layout = KVLayout(model="f", dtype="float32", layers=2, kv_heads=4, head_dim=8, page_size=16)
    base = record("a", provider="tcp", layout=layout)
    sharded = msgspec.structs.replace(layout, ranks=2)
    assert pairing(base) == pairing(msgspec.structs.replace(base, layout=sharded, role=Role.PREFILLER))
    for change in ({"provider": "shm"}, {"layout": msgspec.structs.replace(layout, page_size=32)}, {"layout": None}):
        assert pairing(base) != pairing(msgspec.structs.replace(base, **change))
