"""Getting a place: at once, or in a line that is bounded in length and in time."""

import asyncio

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
        self.waiting = 0

    async def place(self, ask: PlacementAsk) -> Placement:
        """Return a reservation.

        Raises KvferryError: OVERLOADED after the wait, or when the line is full; what the placer raises else, at once.
        """
        if not self.waiting:
            try:
                return await self._ask(ask)
            except KvferryError as error:
                if error.error.code is not ErrorCode.OVERLOADED:
                    raise
        if self.waiting >= self._line_length:
            msg = f"all decoders are full and {self.waiting} requests wait already"
            raise fail(ErrorCode.OVERLOADED, msg, Phase.ROUTE, retry_after=self._line_seconds)
        return await self._wait(ask)

    async def _wait(self, ask: PlacementAsk) -> Placement:
        self.waiting += 1
        self._metrics.waiting.set(self.waiting)
        try:
            async with asyncio.timeout(self._line_seconds), self._turn:
                return await self._poll(ask)
        except TimeoutError:
            msg = f"all decoders are full: no place came free within {self._line_seconds:g} s"
            raise fail(ErrorCode.OVERLOADED, msg, Phase.ROUTE, retry_after=self._line_seconds) from None
        finally:
            self.waiting -= 1
            self._metrics.waiting.set(self.waiting)

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
