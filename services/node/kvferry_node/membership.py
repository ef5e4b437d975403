"""The cluster as this node last saw it.

A node is gone when the cluster says so: it left, its lease ended, or another life of it has joined. An empty Redis
says nothing: after an outage or a flush nodes get the time of a lease to come back before they count as gone.
"""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import msgspec
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role

from kvferry_node.logs import Throttle, get_logger
from kvferry_node.redis_link import NoAnswer, Unreachable, connect, script, trouble, within

Callback = Callable[[NodeRecord], None]

VIEW_LAG_NS = 2_000_000_000
"""A node that joined so short a time ago may not be in another node's view yet."""
# Events wake at once; this is how old a load, or a lease's end that no other node has told of, may become. A look costs
# 0.7 ms: four of them a second were a third of what an idle node burnt.
_BLOCK_MS = 500
_RETRY_SECONDS = 0.25
# For a whole round: the wait for an event, and the look at the cluster.
_TIMEOUT_SECONDS = 1.0


class MembershipView:
    """Who is in the cluster, kept up to date while `run` runs, and as last seen while Redis is away."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        on_join: Callback | None = None,
        on_leave: Callback | None = None,
        grace_seconds: float = 3.0,
    ) -> None:
        """`on_join` and `on_leave` are called in the loop, once for each life of a node.

        `grace_seconds` (that of a lease): how long a node may be missing without a word, and how long after Redis has
        come back no lease is held to have ended.
        """
        self.nodes: dict[str, NodeRecord] = {}
        self.available = False
        """Whether Redis answered the last call."""
        self.synced = asyncio.Event()
        """Set once the cluster has been seen."""
        self._loads: dict[str, Load] = {}
        self._missing: dict[str, float] = {}
        self._on_join = on_join
        self._on_leave = on_leave
        self._grace = grace_seconds
        self._prefix = f"{namespace}:node:"
        self._keys = [f"{namespace}:nodes", f"{namespace}:members"]
        self._position = ""
        self._since = 0.0
        self._redis = connect(url)
        self._snapshot = script(self._redis, "snapshot")
        self._log = get_logger()
        self._throttle = Throttle(5.0)

    def load(self, node_id: str) -> Load:
        """Return a node's load as last told; a Load of zeros for one that has told none."""
        return self._loads.get(node_id, Load())

    def by_role(self, role: Role) -> list[NodeRecord]:
        """Return the nodes of a role, those that drain among them."""
        return [record for record in self.nodes.values() if record.role == role]

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        try:
            while True:
                try:
                    async with within(_TIMEOUT_SECONDS):
                        await self._step()
                except Unreachable as error:
                    if isinstance(error, NoAnswer) and error.ours:
                        # Asked again at once, before a whole cluster is taken for unreachable.
                        continue
                    self._lost(error)
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection; `run` does so by itself."""
        await self._redis.aclose()

    async def _step(self) -> None:
        """Wait a moment for an event, then look at everything: events wake, the snapshot is the truth."""
        gone = await self._events() if self.available else set()
        settled = self.available and time.monotonic() - self._since > self._grace
        last, *found = await self._snapshot(keys=self._keys, args=[self._prefix, int(settled)])
        if not self.available:
            self.available, self._since = True, time.monotonic()
            self._missing.clear()
        if not self._position or _entry(last) < _entry(self._position):
            # First look, or a Redis that has lost its stream: its entries begin again below where we were.
            self._position = last
        self._reconcile(found, gone)
        self.synced.set()

    async def _events(self) -> set[NodeRef]:
        """Return who left or was lost, waiting at most _BLOCK_MS for the first event."""
        answer = await self._redis.xread({self._keys[1]: self._position}, block=_BLOCK_MS, count=1000)
        streams = cast("list[tuple[str, list[tuple[str, dict[str, str]]]]]", answer or [])
        gone = set()
        for _, entries in streams:
            for position, event in entries:
                self._position = position
                if event.get("event") in ("leave", "lost"):
                    gone.add(NodeRef(event["id"], int(event["incarnation"], 16)))
        return gone

    def _reconcile(self, found: list[list[str | None]], gone: set[NodeRef]) -> None:
        seen: dict[str, NodeRecord] = {}
        for text, *numbers in found:
            record = self._record(text or "")
            if record is not None:
                seen[record.ref.id] = record
                self._loads[record.ref.id] = _load(numbers)
        for node_id, known in list(self.nodes.items()):
            now = seen.get(node_id)
            if (now is None and self._is_gone(known, gone)) or (now is not None and now.ref != known.ref):
                self._remove(known)
        for node_id in self._loads.keys() - self.nodes.keys() - seen.keys():
            del self._loads[node_id]
        for node_id, record in seen.items():
            self._missing.pop(node_id, None)
            new = node_id not in self.nodes
            self.nodes[node_id] = record
            if new and self._on_join is not None:
                self._on_join(record)

    def _is_gone(self, record: NodeRecord, gone: set[NodeRef]) -> bool:
        if record.ref in gone:
            return True
        since = self._missing.setdefault(record.ref.id, time.monotonic())
        return time.monotonic() - since > self._grace

    def _remove(self, record: NodeRecord) -> None:
        node_id = record.ref.id
        del self.nodes[node_id]
        self._missing.pop(node_id, None)
        if self._on_leave is not None:
            self._on_leave(record)

    def _record(self, text: str) -> NodeRecord | None:
        try:
            return msgspec.json.decode(text, type=NodeRecord)
        except msgspec.DecodeError as error:
            self._warn("redis holds a node record that cannot be read", error=str(error))
            return None

    def _lost(self, error: BaseException) -> None:
        self.available = False
        what, why = trouble(error)
        self._warn(f"{what}; going on with the cluster as last seen", error=why)

    def _warn(self, event: str, **fields: object) -> None:
        if (held := self._throttle.passes(event)) is not None:
            self._log.warning(event, held_back=held, **fields)


def _load(numbers: list[str | None]) -> Load:
    """Read free_pages, running, waiting, queued_tokens; a node that has told nothing yet has none of them."""
    free_pages, running, waiting, queued_tokens = (int(number or 0) for number in numbers)
    return Load(free_pages=free_pages, running=running, waiting=waiting, queued_tokens=queued_tokens)


def _entry(position: str) -> tuple[int, int]:
    """A stream entry's id, in the order of the stream."""
    milliseconds, _, sequence = position.partition("-")
    return int(milliseconds), int(sequence)
