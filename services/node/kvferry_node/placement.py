"""Placement: choosing nodes for a request, and reserving on them, in one step in Redis."""

import asyncio
import time
from typing import Any

import msgspec
from kvferry_proto.errors import ErrorCode, KvferryError, Phase, fail
from kvferry_proto.nodes import NodeRecord, NodeRef, Role

from kvferry_node.choose import Candidate, Choice, PlacementAsk, Unplaced, choose
from kvferry_node.logs import Throttle, get_logger
from kvferry_node.membership import MembershipView
from kvferry_node.metrics import NodeMetrics
from kvferry_node.redis_link import Unreachable, connect, script, trouble, within

__all__ = ["Placement", "PlacementAsk", "Placer"]

RESERVE_SECONDS = 10.0
"""A reservation that was neither admitted nor released is void after so long."""
_RETRY_AFTER = 1.0
_TIMEOUT_SECONDS = 1.0
_CONNECTIONS = 4


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes a request."""

    request_id: str
    decoder: NodeRecord
    prefiller: NodeRecord | None
    """None: the decoder prefills by itself."""


class Placer:
    """Places requests through Redis, and by the last view of the cluster while Redis is away."""

    def __init__(
        self,
        url: str,
        namespace: str,
        view: MembershipView,
        metrics: NodeMetrics | None = None,
        *,
        node: str = "",
        reserve_seconds: float = RESERVE_SECONDS,
    ) -> None:
        """`node`: id of this router, named in errors."""
        self._namespace = namespace
        self._view = view
        self._metrics = metrics or NodeMetrics()
        self._node = node
        self._lifetime = reserve_seconds
        self._redis = connect(url, connections=_CONNECTIONS)
        self._turns = asyncio.Semaphore(_CONNECTIONS)
        self._script = script(self._redis, "placement")
        self._held = LocalReservations(reserve_seconds)
        self._log = get_logger()
        self._throttle = Throttle(5.0)

    async def place(self, ask: PlacementAsk) -> Placement:
        """Choose and reserve. Raises KvferryError.

        NO_NODES: nobody of a role is there; OVERLOADED, with retry_after: they are, and full; PROMPT_TOO_LONG: more
        pages than any decoder has.
        """
        # Without Redis in sight, waiting for it to time out would only add to the client's wait.
        choice = await self._in_turn(ask) if self._view.available else None
        return self.place_locally(ask) if choice is None else self._second_look(ask, choice)

    def place_locally(self, ask: PlacementAsk) -> Placement:
        """Choose as `place` does, by the last view and this router's own reservations. Raises KvferryError."""
        return self._conclude(ask, "local", self._choose_locally(ask))

    async def release(self, placement: Placement, *, decoder: bool = True) -> None:
        """Give back what no beat of a node has taken over yet: the request has ended. Twice is as good as once.

        `decoder`: False gives back the prefiller's part alone. Where Redis is away the reservation ends by itself.
        """
        records = (placement.decoder if decoder else None, placement.prefiller)
        refs = [record.ref for record in records if record is not None]
        for ref in refs:
            self._held.drop(ref, placement.request_id)
        async with self._turns:
            # Looked at now: those in line behind one that timed out, and whoever places behind them, wait for nothing.
            if not self._view.available:
                return
            try:
                async with within(_TIMEOUT_SECONDS), self._redis.pipeline(transaction=False) as pipe:
                    for ref in refs:
                        pipe.hdel(f"{self._namespace}:held:{ref.id}:{ref.incarnation:x}", placement.request_id)
                    await pipe.execute()
            except Unreachable as error:
                self._failed(error)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    def _second_look(self, ask: PlacementAsk, choice: Choice | Unplaced) -> Placement:
        """Redis that was flushed or restarted knows of nobody for a moment; what the view still knows helps out."""
        if isinstance(choice, Unplaced) and choice.why == "no_nodes":
            second = self._choose_locally(ask)
            if isinstance(second, Choice):
                return self._conclude(ask, "local", second)
        return self._conclude(ask, "redis", choice)

    async def _in_turn(self, ask: PlacementAsk) -> Choice | Unplaced | None:
        """Ask Redis when a connection is free; None if it can't be asked. The wait for one is no fault of Redis."""
        async with self._turns:
            if not self._view.available:
                return None
            try:
                return await self._ask_redis(ask)
            except Unreachable as error:
                self._failed(error)
                return None

    async def _ask_redis(self, ask: PlacementAsk) -> Choice | Unplaced:
        derived = {"prefill_tokens": ask.prefill_tokens, "exclude": [str(ref) for ref in ask.exclude]}
        asked = msgspec.to_builtins(ask) | derived
        args: list[str | bytes | int] = [self._namespace, msgspec.json.encode(asked), int(1000 * self._lifetime)]
        async with within(_TIMEOUT_SECONDS):
            answer: list[Any] = await self._script(keys=[f"{self._namespace}:nodes"], args=args)
        if answer[0] != "placed":
            return Unplaced(answer[0], Role(answer[1]), int(answer[2]))
        decoder, prefiller = (msgspec.json.decode(text, type=NodeRecord) if text else None for text in answer[1:])
        assert decoder is not None
        return Choice(decoder, prefiller)

    def _choose_locally(self, ask: PlacementAsk) -> Choice | Unplaced:
        choice = choose(ask, [self._candidate(record) for record in self._view.nodes.values()])
        if isinstance(choice, Choice):
            self._held.add(choice.decoder.ref, ask.request_id, pages=ask.pages, tokens=0)
            if choice.prefiller is not None:
                self._held.add(choice.prefiller.ref, ask.request_id, pages=0, tokens=ask.prefill_tokens)
        return choice

    def _candidate(self, record: NodeRecord) -> Candidate:
        return Candidate(record, self._view.load(record.ref.id), *self._held.total(record.ref))

    def _conclude(self, ask: PlacementAsk, way: str, choice: Choice | Unplaced) -> Placement:
        if isinstance(choice, Unplaced):
            self._metrics.placements.labels(way, choice.why).inc()
            raise self._error(ask, choice)
        self._metrics.placements.labels(way, "placed").inc()
        return Placement(request_id=ask.request_id, decoder=choice.decoder, prefiller=choice.prefiller)

    def _error(self, ask: PlacementAsk, unplaced: Unplaced) -> KvferryError:
        if unplaced.why == "too_large":
            text = f"the request needs {ask.pages} KV pages, the largest decoder has {unplaced.most}"
            return fail(ErrorCode.PROMPT_TOO_LONG, text, Phase.ROUTE, self._node)
        if unplaced.why == "overloaded":
            text = f"every {unplaced.role} of model {ask.model!r} is full"
            return fail(ErrorCode.OVERLOADED, text, Phase.ROUTE, self._node, retry_after=_RETRY_AFTER)
        text = f"no {unplaced.role} of model {ask.model!r} is available"
        return fail(ErrorCode.NO_NODES, text, Phase.ROUTE, self._node, retry_after=_RETRY_AFTER)

    def _failed(self, error: BaseException) -> None:
        self._metrics.redis_errors.inc()
        if (held := self._throttle.passes("redis")) is not None:
            what, why = trouble(error)
            self._log.warning(f"{what}; placing by the last view", error=why, held_back=held)


class LocalReservations:
    """What this router has placed by itself and no node has told of yet; each ends after a while."""

    def __init__(self, lifetime: float) -> None:
        """`lifetime`: seconds."""
        self._lifetime = lifetime
        self._held: dict[NodeRef, dict[str, tuple[float, int, int]]] = {}

    def add(self, ref: NodeRef, request_id: str, *, pages: int, tokens: int) -> None:
        """Reserve on one life of a node."""
        self._held.setdefault(ref, {})[request_id] = (time.monotonic() + self._lifetime, pages, tokens)

    def drop(self, ref: NodeRef, request_id: str) -> None:
        """Forget a reservation, if it is still there."""
        held = self._held.get(ref, {})
        held.pop(request_id, None)
        if not held:
            self._held.pop(ref, None)

    def total(self, ref: NodeRef) -> tuple[int, int, int]:
        """Return the requests, pages and tokens reserved on a node."""
        now = time.monotonic()
        for request_id in [name for name, held in self._held.get(ref, {}).items() if held[0] <= now]:
            self.drop(ref, request_id)
        held = self._held.get(ref, {}).values()
        return len(held), sum(pages for _, pages, _ in held), sum(tokens for _, _, tokens in held)
