"""A node's own entry in Redis: a lease that heartbeats renew, with its record and load."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec
from kvferry_proto.nodes import Load, NodeRecord

from kvferry_node.errors import NodeIdTaken
from kvferry_node.logs import Throttle, get_logger
from kvferry_node.membership import MembershipView
from kvferry_node.metrics import NodeMetrics
from kvferry_node.redis_link import Unreachable, connect, script, trouble, within

__all__ = ["MembershipView", "Registry", "pairing"]

_RETRY_SECONDS = 0.25
# Reservations expire by themselves within seconds; more than these are never worth remembering through an outage.
_MAX_ADMITTED = 20_000


def pairing(record: NodeRecord) -> str:
    """Return what two nodes must have in common to exchange pages: provider, and the layout but for its sharding."""
    layout = record.layout
    if layout is None:
        return ""
    shape = (layout.layers, layout.kv_heads, layout.head_dim, layout.page_size, int(layout.latent))
    return "|".join((record.provider, layout.model, layout.dtype, *map(str, shape)))


class Registry:
    """Keeps one node known to the cluster, through outages and losses of Redis."""

    def __init__(
        self,
        url: str,
        namespace: str,
        record: NodeRecord,
        *,
        lease_seconds: float = 3.0,
        heartbeat_seconds: float = 0.5,
        metrics: NodeMetrics | None = None,
    ) -> None:
        self.record = record
        self._lease_ms = int(1000 * lease_seconds)
        self._heartbeat = heartbeat_seconds
        self._metrics = metrics or NodeMetrics()
        # A call that hangs must fail early enough for two more within the lease.
        self._timeout = max(0.1, lease_seconds / 3)
        self._redis = connect(url)
        self._beat = script(self._redis, "beat")
        self._leave = script(self._redis, "leave")
        ref = record.ref
        self._incarnation = f"{ref.incarnation:x}"
        self._keys = [f"{namespace}:{name}" for name in ("nodes", "members", f"node:{ref.id}")]
        self._keys.append(f"{namespace}:held:{ref.id}:{self._incarnation}")
        self._admitted: deque[str] = deque(maxlen=_MAX_ADMITTED)
        self._lock = asyncio.Lock()
        self._joined = False
        self._left = False
        self._log = get_logger()
        self._throttle = Throttle(5.0)

    async def join(self) -> None:
        """Enter the cluster, taking the place of an earlier life of this node. Waits for Redis as long as it takes.

        The node is not placed on before `run` tells its load.
        """
        while not self._joined:
            try:
                await self._renew(None, takeover=True)
            except Unreachable as error:
                self._failed(error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def run(self, load: Callable[[], Load], admitted: Callable[[], list[str]]) -> None:
        """Renew the lease until cancelled, or until `leave`.

        Both functions are called together before each beat: `load` tells the node's load, `admitted` the request ids
        accepted since its last call, which `load` now includes. Raises NodeIdTaken when another process has joined
        under the same node id.
        """
        while not self._left:
            began = time.monotonic()
            self._admitted.extend(admitted())
            try:
                await self._renew(load(), takeover=False)
                pause = self._heartbeat
            except Unreachable as error:
                self._failed(error)
                pause = min(self._heartbeat, _RETRY_SECONDS)
            await asyncio.sleep(max(0.0, began + pause - time.monotonic()))

    async def set_draining(self) -> None:
        """Tell the cluster, now if Redis is there and with the next beat otherwise, to place nothing new here."""
        self.record = msgspec.structs.replace(self.record, draining=True)
        try:
            await self._renew(None, takeover=False)
        except Unreachable as error:
            self._failed(error)

    async def leave(self) -> None:
        """Leave the cluster and end `run`. Where Redis is away the lease ends by itself."""
        self._left = True
        async with self._lock:
            try:
                async with within(self._timeout):
                    await self._leave(keys=self._keys, args=[self.record.ref.id, self._incarnation])
            except Unreachable as error:
                self._failed(error)
        self._log.info("left the cluster", node=self.record.ref.id)

    async def close(self) -> None:
        """Close the connection; the lease stays until it ends."""
        await self._redis.aclose()

    async def _renew(self, load: Load | None, *, takeover: bool) -> None:
        async with self._lock:
            if self._left:
                return
            sent = list(self._admitted) if load is not None else []
            fields = self._fields(load)
            head: list[str | int] = [int(takeover), self.record.ref.id, self._incarnation, self._lease_ms, len(fields)]
            pairs = [part for field in fields.items() for part in field]
            async with within(self._timeout):
                outcome = await self._beat(keys=self._keys, args=[*head, *pairs, *sent])
            for _ in sent:
                self._admitted.popleft()
        self._succeeded(outcome)

    def _succeeded(self, outcome: object) -> None:
        self._metrics.redis_up.set(1)
        self._metrics.heartbeats.inc()
        if outcome == "taken":
            msg = f"another process has joined as {self.record.ref.id}: give every node a --node-id of its own"
            raise NodeIdTaken(msg)
        if outcome == "joined":
            self._log.info("joined the cluster", node=str(self.record.ref), again=self._joined)
        self._joined = True

    def _failed(self, error: BaseException) -> None:
        self._metrics.redis_up.set(0)
        self._metrics.redis_errors.inc()
        if (held := self._throttle.passes("redis")) is not None:
            what, why = trouble(error)
            self._log.warning(f"{what}; trying again", error=why, held_back=held)

    def _fields(self, load: Load | None) -> dict[str, str | int]:
        record = self.record
        fields: dict[str, str | int] = {
            "incarnation": self._incarnation,
            "record": msgspec.json.encode(record).decode(),
            "role": record.role,
            "model": record.model,
            "draining": int(record.draining),
            "pairing": pairing(record),
            "total_pages": record.total_pages,
            "max_requests": record.max_running + record.max_waiting,
            "max_context": record.max_context,
            "local_prefill_tokens": record.local_prefill_tokens,
        }
        return fields if load is None else fields | msgspec.structs.asdict(load)
