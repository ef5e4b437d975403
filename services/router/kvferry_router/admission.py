"""Getting a place: at once, in a line that is bounded in length and in time, or once a node has come."""

import asyncio
from collections.abc import Callable

from kvferry_node.placement import Placement, PlacementAsk, Placer
from kvferry_proto.errors import ErrorCode, KvferryError, Phase, fail

from kvferry_router.metrics import RouterMetrics

POLL_SECONDS = 0.05


class Admission:
    """Asks the placer; while the cluster is full, requests stand in line and only the first one asks."""

    def __init__(self, placer: Placer, metrics: RouterMetrics, *, line_length: int, line_seconds: float) -> None:
        self._placer = placer
        self._metrics = metrics
        self._line_length = line_length
        self._line_seconds = line_seconds
        self._turn = asyncio.Lock()
        self._returns: set[asyncio.Task[None]] = set()
        self._in_line = 0
        self._for_nodes = 0
        self._joined = asyncio.Event()
        """Replaced by a new one when it is set: each waiter has the one that was there before it asked."""

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return self._in_line + self._for_nodes

    def on_join(self) -> None:
        """A node has joined."""
        self._joined.set()
        self._joined = asyncio.Event()

    async def place(
        self, ask: Callable[[], PlacementAsk], *, again: bool = False, recovery_seconds: float = 0.0
    ) -> Placement:
        """Return a reservation.

        `ask` is called for each try: what is asked for depends on who is there. `again`: the request was taken before,
        and may stand in line however long that is. `recovery_seconds`: where no node is there, how long to wait for one
        to come.

        Raises KvferryError: OVERLOADED after the wait, or when the line is full; NO_NODES; what the placer raises else,
        at once.
        """
        deadline = asyncio.get_running_loop().time() + recovery_seconds
        while True:
            joined = self._joined
            try:
                return await self._place(ask(), again=again)
            except KvferryError as error:
                if error.error.code is not ErrorCode.NO_NODES or not await self._until(joined, deadline):
                    raise

    async def _until(self, joined: asyncio.Event, deadline: float) -> bool:
        """Wait for a node to join; return whether one has by the deadline."""
        self._count(for_nodes=1)
        try:
            async with asyncio.timeout_at(deadline):
                await joined.wait()
        except TimeoutError:
            return False
        finally:
            self._count(for_nodes=-1)
        return True

    def _count(self, *, in_line: int = 0, for_nodes: int = 0) -> None:
        self._in_line += in_line
        self._for_nodes += for_nodes
        self._metrics.waiting.set(self.waiting)

    async def _place(self, ask: PlacementAsk, *, again: bool) -> Placement:
        if not self._in_line:
            try:
                return await self._ask(ask)
            except KvferryError as error:
                if error.error.code is not ErrorCode.OVERLOADED:
                    raise
        if self._in_line >= self._line_length and not again:
            msg = f"all decoders are full and {self._in_line} requests wait already"
            raise fail(ErrorCode.OVERLOADED, msg, Phase.ROUTE, retry_after=self._line_seconds)
        return await self._wait(ask)

    async def _wait(self, ask: PlacementAsk) -> Placement:
        self._count(in_line=1)
        try:
            async with asyncio.timeout(self._line_seconds), self._turn:
                return await self._poll(ask)
        except TimeoutError:
            msg = f"all decoders are full: no place came free within {self._line_seconds:g} s"
            raise fail(ErrorCode.OVERLOADED, msg, Phase.ROUTE, retry_after=self._line_seconds) from None
        finally:
            self._count(in_line=-1)

    async def _poll(self, ask: PlacementAsk) -> Placement:
        while True:
            try:
                return await self._ask(ask)
            except KvferryError as error:
                if error.error.code is not ErrorCode.OVERLOADED:
                    raise
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, ask: PlacementAsk) -> Placement:
        """Ask to the end even if the request is cancelled meanwhile: a reservation nobody knows of would stay."""
        task = asyncio.ensure_future(self._placer.place(ask))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._give_back)
            raise

    def _give_back(self, task: "asyncio.Task[Placement]") -> None:
        if not task.cancelled() and task.exception() is None:
            self.release(task.result())

    def release(self, placement: Placement, *, decoder: bool = True) -> None:
        """Give back, in the background, what nodes have not taken over of a reservation.

        Without `decoder` the prefiller's part alone.
        """
        task = asyncio.ensure_future(self._placer.release(placement, decoder=decoder))
        self._returns.add(task)
        task.add_done_callback(self._returned)

    def _returned(self, task: "asyncio.Task[None]") -> None:
        self._returns.discard(task)
        # Reservations expire by themselves: a failure costs seconds of a place, no more, and the placer has logged it.
        if not task.cancelled():
            task.exception()

    async def close(self) -> None:
        """Wait for reservations on their way back."""
        await asyncio.gather(*self._returns, return_exceptions=True)
