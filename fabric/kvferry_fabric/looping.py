"""Events on an event loop: what an engine does with them, whatever carries its pages."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvferry_fabric.events import Event


class Looping(ABC):
    """Has a callback run for every event that `poll` returns, whenever `event_fd` is readable."""

    _loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def poll(self) -> list[Event]:
        """Return the events since the last call; does not wait."""

    @property
    @abstractmethod
    def event_fd(self) -> int:
        """A file descriptor that is readable while events wait to be polled."""

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callable[[Event], None]) -> None:
        """Have `callback` run on `loop` for every event, in order. One that raises goes to the loop's handler."""
        self.detach()

        def ready() -> None:
            for event in self.poll():
                try:  # at once: over another round of the loop an arrival was told of 15 to 20 us later
                    callback(event)
                except Exception as error:  # noqa: BLE001 - the callback's; further events are not to suffer from it
                    loop.call_exception_handler({"message": f"{callback!r} failed on {event!r}", "exception": error})

        loop.add_reader(self.event_fd, ready)
        self._loop = loop

    def detach(self) -> None:
        """Undo attach()."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.event_fd)
        self._loop = None
