"""MemoryEngine: the contract of TransferEngine, without a thread, a socket or a clock; for one thread."""

import os
from typing import Self, TypeVar

import numpy as np
from kvferry_proto.memory import MemoryDescriptor

from kvferry_fabric.contract import PeerHandle, RegionHandle
from kvferry_fabric.errors import FabricError
from kvferry_fabric.events import EngineStats, Event
from kvferry_fabric.in_memory.bounds import check, check_immediate
from kvferry_fabric.in_memory.handles import Counter, Handle, NoMemory, PeerLink, Region
from kvferry_fabric.in_memory.network import Network
from kvferry_fabric.in_memory.slots import Slots
from kvferry_fabric.in_memory.transfer import Handles, Transfer
from kvferry_fabric.looping import Looping
from kvferry_fabric.runs import Runs
from kvferry_fabric.schedule import ChunkSchedule, PagedWrite, timeout_ns
from kvferry_fabric.shared_memory import SharedMemory

H = TypeVar("H", bound=Handle)


def _check_address(address: str) -> None:
    try:
        known = bytes.fromhex(address).startswith(b"mem")
    except ValueError as wrong:
        msg = f"peer address {address[:80]!r} is not hexadecimal"
        raise FabricError(msg) from wrong
    if not known:
        msg = f"peer address {address[:80]!r} is not an address of a memory engine"
        raise FabricError(msg)


class MemoryEngine(Looping):
    """Everything happens within the call that causes it, or when the test tells the network."""

    provider = pairing = "memory"
    seat = ""

    def __init__(self, network: Network, *, incarnation: int, trace: bool = False) -> None:
        self.network, self.incarnation, self.trace = network, incarnation, trace
        self.handles: list[Handle] = []
        self.faults = {"corrupt": 0, "delay": 0, "fail": 0}
        self._events: list[Event] = []
        self._slots = Slots(self._events)
        self._transfers: dict[int, Transfer] = {}
        self._serial = self._keys = 0
        self._totals = {"writes": 0, "pages": 0, "bytes": 0, "errors": 0}
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.closed = False
        self.address = network.join(self)

    # --- what the contract asks for ---

    def register(self, memory: memoryview | SharedMemory) -> Region:
        """Register memory under a key that no other registration has."""
        self.check_open()
        self._keys += 1
        return Region(self, memory.buffer if isinstance(memory, SharedMemory) else memory, self._keys)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of its one domain."""
        return (self.address,)

    def connect(self, addresses: tuple[str, ...], seat: str = "") -> PeerLink:  # noqa: ARG002 - it has no seat
        """Prepare to write to an engine; whether there is one shows when something is written to it."""
        self.check_open()
        if len(addresses) != 1:
            msg = f"a memory engine has one domain, not {len(addresses)}"
            raise FabricError(msg)
        _check_address(addresses[0])
        return PeerLink(self, addresses)

    def forget(self, addresses: tuple[str, ...], seat: str = "") -> None:  # noqa: ARG002 - it has no seat
        """Who is there is held to be gone: what is on its way there is dropped, and its transfers fail."""
        self.check_open()
        for address in addresses:
            _check_address(address)
            self.network.cut(self, address)
            self.peer_is_lost(address, "the receiver is held to be lost")

    def new_counter(self) -> Counter:
        """Return a layer counter that stands at 0."""
        self.check_open()
        return Counter(self)

    def expect(self, slot: int, generation: int, pages: int) -> None:
        """Arm a slot."""
        self.check_open()
        self._slots.expect(slot, generation, pages)
        self._signal()

    def disarm(self, slot: int, generation: int) -> bool:
        """Stop counting for a slot."""
        self.check_open()
        return self._slots.disarm(slot, generation)

    def arrived(self, slot: int) -> int:
        """Pages that have arrived for a slot since it was armed."""
        self.check_open()
        return self._slots.arrived(slot)

    def schedule_layers(self, chunk: ChunkSchedule, *, deadline: float | None = None) -> Transfer:
        """Register a chunk."""
        self.check_open()
        counter = None if chunk.counter is None else self._own(chunk.counter, Counter)
        handles = Handles(self._own(chunk.region, Region), self._own(chunk.peer, PeerLink), counter)
        self._check_remote(chunk.remote, chunk.peer)
        return self._start(chunk, check(chunk, handles.region.memory.nbytes), handles, deadline)

    def write_pages(self, pages: PagedWrite, *, deadline: float | None = None) -> Transfer:
        """Write pages of every layer at once."""
        return self.schedule_layers(pages.after(None, 0), deadline=deadline)

    def write_immediate(
        self,
        *,
        peer: PeerHandle,
        remote: MemoryDescriptor,
        slot: int,
        generation: int,
        pages: int = 1,
        deadline: float | None = None,
    ) -> Transfer:
        """Write no bytes, and count as `pages` pages of the slot."""
        self.check_open()
        runs, nothing = check_immediate(slot, generation, pages), NoMemory(self)
        self._check_remote(remote, peer)
        chunk = ChunkSchedule(
            counter=None, first_value=0, layers=1, region=nothing, peer=peer, remote=remote, slot=slot,
            generation=generation, source_layer_stride=0, destination_layer_stride=0, source_page_stride=0,
            destination_page_stride=0, length=0, runs=runs,
        )  # fmt: skip
        return self._start(chunk, runs, Handles(nothing, self._own(peer, PeerLink), None), deadline)

    def _start(self, chunk: ChunkSchedule, runs: Runs, handles: Handles, deadline: float | None) -> Transfer:
        timeout_ns(deadline)
        self._serial += 1
        transfer = self._transfers[self._serial] = Transfer(self, self._serial, chunk, runs, handles, deadline=deadline)
        if len(runs):
            self.follow()
        else:
            transfer.post()
        return transfer

    def _check_remote(self, remote: MemoryDescriptor, peer: PeerHandle) -> None:
        if (remote.provider, remote.addresses) != (self.provider, peer.addresses):
            msg = f"memory of {remote.provider} {remote.addresses} cannot be written through this peer"
            raise FabricError(msg)

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
    ) -> Transfer:
        """Write `length` bytes at once, as one page of the slot."""
        chunk = ChunkSchedule(
            counter=None, first_value=0, layers=1, region=region, peer=peer, remote=remote, slot=slot,
            generation=generation, source_layer_stride=0, destination_layer_stride=0, source_page_stride=length,
            destination_page_stride=length, length=length, source_start=source_offset,
            destination_start=destination_offset, runs=np.array([[0, 0, 1]], np.int32),
        )  # fmt: skip
        return self.schedule_layers(chunk, deadline=deadline)

    def poll(self) -> list[Event]:
        """Return the events since the last call."""
        self.check_open()
        self.follow()
        taken = self._events[:]
        self._events.clear()
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return taken  # it was not readable: events were dropped by disarm(), or there were none
        return taken

    @property
    def event_fd(self) -> int:
        """A file descriptor that is readable while events wait."""
        return self._fd

    def stats(self) -> EngineStats:
        """Return the engine's counts."""
        self.check_open()
        ended = sum(1 for event in self._events if event.transfer)
        peers = {handle.addresses[0] for handle in self.handles if isinstance(handle, PeerLink)}
        return EngineStats(
            armed_slots=len(self._slots), active_transfers=len(self._transfers), held_transfers=ended,
            in_flight_writes=sum(transfer.in_flight for transfer in self._transfers.values()),
            regions=sum(isinstance(handle, Region) for handle in self.handles),
            peers=len(peers | {transfer.peer for transfer in self._transfers.values()}),
            counters=sum(isinstance(handle, Counter) for handle in self.handles),
            stale_immediates=self._slots.stale, arrivals=self._slots.counted, local_bytes=0, sleeps=0, **self._totals,
        )  # fmt: skip

    def fault(self, kind: str, value: int) -> None:
        """Inject a fault, as TransferEngine does."""
        if kind not in self.faults:
            msg = f"fault {kind!r} is not one of {', '.join(self.faults)}"
            raise ValueError(msg)
        self.faults[kind] = value

    def close(self) -> None:
        """Free everything; nothing of this engine lands any more."""
        if self.closed:
            return
        self.detach()
        self.closed = True
        ended = list(self._transfers.values())
        self._transfers.clear()
        for transfer in ended:
            transfer.wake()
        self.network.leave(self)
        for handle in list(self.handles):
            handle.forget()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what the network and the transfers tell it ---

    def follow(self) -> None:
        """Post what layer counters, or the end of a delay, allow; fail what is over its deadline."""
        for transfer in list(self._transfers.values()):
            transfer.expire()
            transfer.post()

    def region_of(self, key: int) -> Region | None:
        """The open region with this key."""
        regions = [
            handle for handle in self.handles if isinstance(handle, Region) and handle.descriptor.domains[0].key == key
        ]
        return regions[0] if regions else None

    def count(self, slot: int, generation: int, pages: int) -> None:
        """An immediate has come in."""
        self._slots.count(slot, generation, pages)
        self._signal()

    def account(self, pages: int, size: int) -> None:
        """A write has gone out."""
        for name, number in (("writes", 1), ("pages", pages), ("bytes", size)):
            self._totals[name] += number

    def transfer_ended(self, transfer: Transfer, event: Event) -> None:
        """A transfer has ended: its event waits to be polled."""
        if self._transfers.pop(transfer.id, None) is not None:
            self._totals["errors"] += bool(event.error)
            self._events.append(event)
            self._signal()

    def peer_is_lost(self, address: str, text: str) -> None:
        """Nothing reaches this address any more."""
        for transfer in list(self._transfers.values()):
            if transfer.peer == address:
                transfer.lose(text)

    def uses(self, handle: Handle) -> bool:
        """Whether a transfer still needs a handle."""
        return any(handle in transfer.handles for transfer in self._transfers.values())

    def due(self, fault: str) -> bool:
        """Whether the present write is the one that a fault was set for."""
        self.faults[fault] = max(0, (left := self.faults[fault]) - 1)
        return left == 1

    def _own(self, handle: object, kind: type[H]) -> H:
        if not isinstance(handle, kind) or handle.engine is not self:
            msg = f"this is no {kind.what} of this engine"
            raise FabricError(msg)
        return handle.check_open()

    def check_open(self) -> None:
        """Raises FabricError if it is closed."""
        if self.closed:
            msg = "the transfer engine is closed"
            raise FabricError(msg)

    def _signal(self) -> None:
        if self._events and not self.closed:
            os.eventfd_write(self._fd, 1)
