"""Transfer: what every call that moves pages returns. It lasts until the transfer's last event, and remembers that."""

import asyncio
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from kvferry_fabric.events import Event, EventKind, LayerTimes, TransferState, TransferStatistics
from kvferry_fabric.native import NativeEngine

_ENDS = {
    EventKind.DONE: TransferState.DONE,
    EventKind.CANCELLED: TransferState.CANCELLED,
    EventKind.FAILED: TransferState.FAILED,
}


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


class Transfer:
    """One transfer of an engine; safe to use from several threads. Dropping it changes nothing.

    The engine reports the last event too, through poll() or the callback, with this handle as its `transfer`.
    """

    __slots__ = ("_bell", "_end", "_lock", "_native", "_traced_layers", "_waiters", "deadline", "id", "peer")

    def __init__(
        self, native: NativeEngine, number: int, peer: str, deadline: float | None, traced_layers: int
    ) -> None:
        """`traced_layers`: layers whose times the engine keeps, 0 if it keeps none."""
        self._native = native
        self.id = number
        """Unique in its engine, never used again."""
        self.peer = peer
        """Address of the receiver's first domain, hex."""
        self.deadline = deadline
        """Seconds from its start after which it fails if it has not ended; None: none."""
        self._traced_layers = traced_layers
        self._end: Event | None = None
        self._lock = Lock()
        self._waiters = 0
        self._bell = -1  # an eventfd, while somebody waits

    def __repr__(self) -> str:
        return f"<Transfer {self.id} to {self.peer}>"

    def __hash__(self) -> int:
        """Of its id: a set of transfers has the same order in every run."""
        return self.id

    @property
    def state(self) -> TransferState:
        """What it does now. Asks the engine's thread, while it lives. Raises FabricError if the engine is closed."""
        with self._lock:
            return _ENDS[self._end.kind] if self._end is not None else self._look()[0]

    @property
    def statistics(self) -> TransferStatistics:
        """What has been posted of it so far, and when. Raises as `state`."""
        with self._lock:
            source = self._end if self._end is not None else self._look()[1]
            return TransferStatistics(*(getattr(source, name) for name in TransferStatistics._fields))

    def cancel(self) -> None:
        """Post no more of it. Its last event follows when nothing of it is in flight any more.

        That event is CANCELLED, or DONE or FAILED if it got there first. One that has ended is left alone.
        """
        if self._end is None:
            self._native.check(self._native.lib.kf_cancel(self._native.pointer, self.id), "cancel")

    def drain(self, timeout: float | None = None) -> Event:
        """Block until nothing of it is in flight and no more will be posted; returns the last event.

        Needs nobody who polls. Raises TimeoutError after `timeout` seconds, FabricError if the engine is closed.
        """
        if self._end is None:
            with self._listening() as fd:
                ended = select.poll()
                ended.register(fd, select.POLLIN)
                if not ended.poll(None if timeout is None else max(0.0, timeout) * 1000):
                    msg = f"transfer {self.id} to {self.peer} has not ended within {timeout} s"
                    raise TimeoutError(msg)
        return self._last()

    async def drained(self) -> Event:
        """As drain(), for a coroutine: its loop runs meanwhile. Giving up the wait leaves the transfer as it is."""
        if self._end is None:
            loop = asyncio.get_running_loop()
            waiting: asyncio.Future[None] = loop.create_future()
            with self._listening() as fd:
                loop.add_reader(fd, _wake, waiting)
                try:
                    await waiting
                finally:
                    loop.remove_reader(fd)
        return self._last()

    def finish(self, raw: Any) -> Event:  # noqa: ANN401 - cdata
        """The engine has taken its last event, a kf_event: keep it, and free what C holds of the transfer."""
        with self._lock:
            event = self._remember(raw)
            self._native.check(self._native.lib.kf_release(self._native.pointer, self.id), "release")
            return event

    def forget(self) -> None:
        """The engine is closed: who waits is told so."""
        with self._lock:
            if self._waiters:
                os.eventfd_write(self._bell, 1)

    def _look(self) -> tuple[TransferState, Any]:
        raw = self._native.ffi.new("kf_event *")
        code = self._native.lib.kf_look(self._native.pointer, self.id, raw)
        return TransferState(self._native.check(code, f"transfer {self.id}")), raw

    def _last(self) -> Event:
        with self._lock:
            if self._end is not None:
                return self._end
            state, raw = self._look()
            assert state >= TransferState.DONE
            return self._remember(raw)

    def _remember(self, raw: Any) -> Event:  # noqa: ANN401 - cdata
        if self._end is None:
            text = self._native.ffi.string(raw.text).decode(errors="replace")
            self._end = Event(
                kind=EventKind(raw.kind), slot=raw.slot, generation=raw.generation, pages=raw.pages, transfer=self,
                bytes=raw.bytes, writes=raw.writes, registered_ns=raw.registered_ns, first_post_ns=raw.first_post_ns,
                last_counter_ns=raw.last_counter_ns, last_completion_ns=raw.last_completion_ns, error=raw.error,
                text=text, peer=self.peer, layers=self._layer_times(),
            )  # fmt: skip
        return self._end

    def _layer_times(self) -> LayerTimes | None:
        layers, native = self._traced_layers, self._native
        if not layers:
            return None
        seen, posted = native.ffi.new("uint64_t[]", layers), native.ffi.new("uint64_t[]", layers)
        native.check(native.lib.kf_trace(native.pointer, self.id, seen, posted, layers), "trace")
        return LayerTimes(tuple(seen), tuple(posted))

    @contextmanager
    def _listening(self) -> Iterator[int]:
        """A file descriptor of the caller's own, readable once the transfer has ended or its engine is closed."""
        with self._lock:
            if not self._waiters:
                self._hang_bell()
            own = os.dup(self._bell)
            self._waiters += 1
        try:
            yield own
        finally:
            os.close(own)
            with self._lock:
                self._waiters -= 1
                if not self._waiters:
                    self._take_bell()

    def _hang_bell(self) -> None:
        pointer = self._native.pointer
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        if self._native.lib.kf_notify(pointer, self.id, self._bell):  # it has ended
            os.eventfd_write(self._bell, 1)

    def _take_bell(self) -> None:
        if not self._native.closed:
            self._native.lib.kf_notify(self._native.pointer, self.id, -1)
        os.close(self._bell)
        self._bell = -1
