"""What every transfer engine does, whatever moves the bytes: TransferEngine over libfabric, MemoryEngine in unit tests.

Code that takes a `Fabric` runs over either. tests/integration/test_fabric_contract.py holds both to the same tests.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvferry_proto.memory import MemoryDescriptor

from kvferry_fabric.events import EngineStats, Event, TransferState, TransferStatistics
from kvferry_fabric.shared_memory import SharedMemory

if TYPE_CHECKING:
    from kvferry_fabric.schedule import ChunkSchedule, PagedWrite


class Closable(Protocol):
    """Something that an engine gave out."""

    def close(self) -> None:
        """Give it back; again is nothing. Raises FabricError, and stays open, while a transfer still needs it."""
        ...


class RegionHandle(Closable, Protocol):
    """Registered memory. Once it is closed, writes with its key fail."""

    @property
    def descriptor(self) -> MemoryDescriptor:
        """What a writer must know of it."""
        ...


class PeerHandle(Closable, Protocol):
    """An engine that can be written to."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its addresses, as its descriptors say them: one a domain."""
        ...


class CounterHandle(Closable, Protocol):
    """A counter that the model raises by one after each layer."""

    @property
    def value(self) -> int:
        """Present value. Raises FabricError once it is closed."""
        ...

    def bump(self, n: int = 1) -> None:
        """Add n: what was written to registered memory before is sent after."""
        ...


class TransferHandle(Protocol):
    """A transfer, from the call that started it on. It compares by identity. What it promises is said at Transfer."""

    @property
    def id(self) -> int:
        """Unique in its engine."""
        ...

    @property
    def peer(self) -> str:
        """Address of the receiver's first domain."""
        ...

    @property
    def deadline(self) -> float | None:
        """Seconds from its start after which it fails if it has not ended; None: none."""
        ...

    @property
    def state(self) -> TransferState:
        """What it does now."""
        ...

    @property
    def statistics(self) -> TransferStatistics:
        """What has been posted of it so far."""
        ...

    def cancel(self) -> None:
        """Post no more; the last event comes when nothing is in flight."""
        ...

    def drain(self, timeout: float | None = None) -> Event:
        """Block until nothing is in flight and no more will be posted; the last event."""
        ...

    async def drained(self) -> Event:
        """As drain(), for a coroutine."""
        ...


class Fabric(Protocol):
    """A transfer engine. What each method promises is said at TransferEngine."""

    @property
    def provider(self) -> str:
        """Whose addresses and keys these are."""
        ...

    @property
    def incarnation(self) -> int:
        """Number of this start of its node."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it is reached: one address a domain."""
        ...

    @property
    def seat(self) -> str:
        """Where writers on the same host find it too; "" if there is no such place."""
        ...

    @property
    def pairing(self) -> str:
        """What two engines must have in common to exchange pages."""
        ...

    @property
    def event_fd(self) -> int:
        """Readable while events wait to be polled."""
        ...

    def register(self, memory: memoryview | SharedMemory) -> RegionHandle:
        """Let peers write to writable, contiguous memory, under a key of its own."""
        ...

    def connect(self, addresses: tuple[str, ...], seat: str = "") -> PeerHandle:
        """Prepare to write to the engine that has these addresses, and this seat."""
        ...

    def forget(self, addresses: tuple[str, ...], seat: str = "") -> None:
        """Who is there is held to be gone: transfers to it fail, connections are not kept."""
        ...

    def new_counter(self) -> CounterHandle:
        """A layer counter that stands at 0."""
        ...

    def expect(self, slot: int, generation: int, pages: int) -> None:
        """Arm a slot: ARRIVED comes when `pages` pages have."""
        ...

    def disarm(self, slot: int, generation: int) -> bool:
        """Stop counting; False if it was not armed so."""
        ...

    def arrived(self, slot: int) -> int:
        """Pages that have come since the slot was armed."""
        ...

    def schedule_layers(self, chunk: "ChunkSchedule", *, deadline: float | None = None) -> TransferHandle:
        """Register a chunk."""
        ...

    def write(
        self,
        *,
        peer: PeerHandle,
        region: RegionHandle,
        source_offset: int,
        remote: MemoryDescriptor,
        destination_offset: int,
        length: int,
        slot: int,
        generation: int,
        deadline: float | None = None,
    ) -> TransferHandle:
        """Write `length` bytes at once, as one page of the slot."""
        ...

    def write_pages(self, pages: "PagedWrite", *, deadline: float | None = None) -> TransferHandle:
        """Write pages of every layer at once."""
        ...

    def write_immediate(
        self,
        *,
        peer: PeerHandle,
        remote: MemoryDescriptor,
        slot: int,
        generation: int,
        pages: int = 1,
        deadline: float | None = None,
    ) -> TransferHandle:
        """Write no bytes, and count as `pages` pages of the slot."""
        ...

    def poll(self) -> list[Event]:
        """Events since the last call."""
        ...

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callable[[Event], None]) -> None:
        """Have `callback` run on `loop` for every event."""
        ...

    def detach(self) -> None:
        """Undo attach()."""
        ...

    def stats(self) -> EngineStats:
        """Counts."""
        ...

    def fault(self, kind: str, value: int) -> None:
        """Inject a fault, for tests."""
        ...

    def close(self) -> None:
        """Free everything; handles become unusable."""
        ...
