"""The life of a transfer in memory, as fabric/csrc/transfer.c has it: it ends only when nothing is in flight."""

import asyncio
import errno
import time
from typing import TYPE_CHECKING

from kvferry_proto.immediate import MAX_PAGES_PER_WRITE

from kvferry_fabric.events import Event, EventKind, LayerTimes, TransferState, TransferStatistics
from kvferry_fabric.in_memory.bounds import sides
from kvferry_fabric.in_memory.network import Write
from kvferry_fabric.runs import Runs
from kvferry_fabric.schedule import ChunkSchedule, timeout_ns

if TYPE_CHECKING:
    from kvferry_fabric.in_memory.engine import MemoryEngine
    from kvferry_fabric.in_memory.handles import Counter, PeerLink, Region


_ENDS = {
    EventKind.DONE: TransferState.DONE,
    EventKind.CANCELLED: TransferState.CANCELLED,
    EventKind.FAILED: TransferState.FAILED,
}


class Transfer:
    """One registered chunk, and its handle."""

    def __init__(
        self, engine: "MemoryEngine", number: int, plan: ChunkSchedule, runs: Runs, handles: "Handles",
        *, deadline: float | None,
    ) -> None:  # fmt: skip
        self.engine, self.id, self.plan, self.handles, self.deadline = engine, number, plan, handles, deadline
        self.peer = plan.peer.addresses[0]
        self._stopped = False
        self._last: Event | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._runs = _split(runs)
        self._end = EventKind.DONE
        self._error, self._text = 0, ""
        self._layer = 0
        self._pages = self._bytes = self._writes = 0
        self._seen, self._posted = [0] * plan.layers, [0] * plan.layers
        self._registered_ns = time.monotonic_ns()
        self._deadline_ns = self._registered_ns + timeout_ns(deadline) if deadline is not None else 0
        self._first_post_ns = self._last_completion_ns = 0
        self.in_flight = 0

    # --- the handle ---

    def __hash__(self) -> int:
        """Of its id: a set of transfers has the same order in every run."""
        return self.id

    @property
    def state(self) -> TransferState:
        """What it does now. Raises FabricError if the engine is closed."""
        if self._last is not None:
            return _ENDS[self._last.kind]
        self.engine.check_open()
        if self._stopped:
            return TransferState.DRAINING
        return TransferState.POSTING if self._layer < self.layers_done() else TransferState.WAITING

    @property
    def statistics(self) -> TransferStatistics:
        """What has been posted so far."""
        return TransferStatistics(
            pages=self._pages, bytes=self._bytes, writes=self._writes, registered_ns=self._registered_ns,
            first_post_ns=self._first_post_ns, last_counter_ns=self._seen[-1],
            last_completion_ns=self._last_completion_ns,
        )  # fmt: skip

    def cancel(self) -> None:
        """Post nothing more; an end that is near already stays what it is."""
        if self._last is None:
            self.engine.check_open()
            self.stop(EventKind.CANCELLED)

    def drain(self, timeout: float | None = None) -> Event:
        """Wait for delays and the deadline. TimeoutError comes at once where nothing else can happen."""
        until = None if timeout is None else time.monotonic_ns() + int(timeout * 1e9)
        while (event := self._followed()) is None:
            due = self._due_ns()
            if not due or (until is not None and due > until):
                msg = f"transfer {self.id} to {self.peer} does not end within {timeout} s"
                raise TimeoutError(msg)
            time.sleep(_seconds_to(due))
        return event

    async def drained(self) -> Event:
        """Wait for whatever ends it."""
        while (event := self._followed()) is None:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            due = self._due_ns()
            await asyncio.wait([waiting], timeout=_seconds_to(due) if due else None)
        return event

    def _followed(self) -> Event | None:
        if self._last is None:
            self.engine.check_open()
            self.engine.follow()
        return self._last

    def _due_ns(self) -> int:
        """When it may move by itself; 0: never."""
        times = [self._deadline_ns] if self._deadline_ns else []
        if not self._stopped and self._layer < self.layers_done():
            times.append(self._seen[self._layer] + self.engine.faults["delay"])
        return min(times, default=0)

    def wake(self) -> None:
        """Have coroutines that wait look again: it has ended, or its engine is closed."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    # --- its life ---

    def layers_done(self) -> int:
        """Layers that may be posted."""
        counter = self.handles.counter
        if counter is None:
            return self.plan.layers
        return max(0, min(self.plan.layers, counter.value - self.plan.first_value + 1))

    def post(self) -> None:
        """Post the writes of the layers that are done, unless the delay fault holds them back."""
        done, now = self.layers_done(), time.monotonic_ns()
        for layer in range(self._layer, done):
            self._seen[layer] = self._seen[layer] or now
        while not self._stopped and self._layer < done:
            if now < self._seen[self._layer] + self.engine.faults["delay"]:
                return
            layer, self._layer = self._layer, self._layer + 1
            for run in self._runs:
                if self._stopped or not self._post_run(layer, run):
                    return
        if self._layer == self.plan.layers or not self._runs:
            self.stop(EventKind.DONE)

    def _post_run(self, layer: int, run: tuple[int, int, int]) -> bool:
        if self.engine.due("fail"):
            self.failed_to_post(errno.EIO, f"write of layer {layer} could not be posted")
            return False
        write = Write(self, layer, self._pieces(layer, run))
        if self.plan.length and self.engine.due("corrupt"):
            offset, data = write.pieces[0]
            write.pieces[0] = (offset, bytes([data[0] ^ 0xFF]) + data[1:])
        now = time.monotonic_ns()
        self._first_post_ns = self._first_post_ns or now
        self._posted[layer] = self._posted[layer] or now
        self._pages += run[2]
        self._bytes += run[2] * self.plan.length
        self._writes += 1
        self.in_flight += 1
        self.engine.account(run[2], run[2] * self.plan.length)
        self.engine.network.post(write)
        return True

    def _pieces(self, layer: int, run: tuple[int, int, int]) -> list[tuple[int, bytes]]:
        memory, length = self.handles.region.memory, self.plan.length
        source, target = sides(self.plan, len(memory))
        places = [(source.place(layer, run[0] + i), target.place(layer, run[1] + i)) for i in range(run[2])]
        return [(there, bytes(memory[here : here + length])) for here, there in places]

    def completed(self) -> None:
        """One of its writes has landed, and this side knows."""
        self.in_flight -= 1
        self._last_completion_ns = time.monotonic_ns()
        self.settle()

    def failed(self, error: int, text: str) -> None:
        """One of its writes has ended in an error."""
        self.in_flight -= 1
        self.failed_to_post(error, text)

    def failed_to_post(self, error: int, text: str) -> None:
        """Post nothing more; the first error is kept."""
        if not self._error:
            self._error, self._text = error, text
        self.stop(EventKind.FAILED)

    def lose(self, text: str) -> None:
        """Its peer is gone: what is still counted as in flight was dropped on the way."""
        if self._last is None:
            self.in_flight = 0
            self.failed_to_post(errno.ECONNRESET, text)

    def expire(self) -> None:
        """Fail, if it has not ended by its deadline; what is in flight is waited for all the same."""
        if self._deadline_ns and time.monotonic_ns() >= self._deadline_ns:
            self._deadline_ns = 0
            self.failed_to_post(errno.ETIMEDOUT, f"not over within {self.deadline} s: writes to {self.peer}")

    def stop(self, end: EventKind) -> None:
        """Post nothing more. An error that comes while draining turns any end into a failure."""
        if not self._stopped:
            self._stopped, self._end = True, end
        elif end is EventKind.FAILED:
            self._end = end
        self.settle()

    def settle(self) -> None:
        """End, if nothing is in flight."""
        if self._stopped and self.in_flight == 0 and self._last is None:
            self._last = self._event()
            self.engine.transfer_ended(self, self._last)
            self.wake()

    def _event(self) -> Event:
        plan = self.plan
        return Event(
            kind=self._end, slot=plan.slot, generation=plan.generation, pages=self._pages, transfer=self,
            bytes=self._bytes, writes=self._writes, registered_ns=self._registered_ns,
            first_post_ns=self._first_post_ns, last_counter_ns=self._seen[-1],
            last_completion_ns=self._last_completion_ns, error=self._error, text=self._text, peer=self.peer,
            layers=LayerTimes(tuple(self._seen), tuple(self._posted)) if self.engine.trace else None,
        )  # fmt: skip


class Handles:
    """The engine's own handles behind a schedule."""

    def __init__(self, region: "Region", peer: "PeerLink", counter: "Counter | None") -> None:
        self.region, self.peer, self.counter = region, peer, counter

    def __contains__(self, handle: object) -> bool:
        return handle in {self.region, self.peer, self.counter}


def _seconds_to(due_ns: int) -> float:
    return max(0, due_ns - time.monotonic_ns()) / 1e9


def _split(runs: Runs) -> list[tuple[int, int, int]]:
    """Runs of at most as many pages as an immediate counts."""
    return [
        (source + start, target + start, min(MAX_PAGES_PER_WRITE, count - start))
        for source, target, count in runs.tolist()
        for start in range(0, max(1, count), MAX_PAGES_PER_WRITE)
    ]
