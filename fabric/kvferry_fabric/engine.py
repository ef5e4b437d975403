"""TransferEngine: the domains (NICs) of a device group, with the C thread that posts to them and counts."""

import weakref
from collections.abc import Collection, Sequence
from threading import Lock
from typing import Any, Self

import numpy as np
from kvferry_proto.memory import MAX_DOMAINS, MemoryDescriptor

from kvferry_fabric.contract import PeerHandle, RegionHandle
from kvferry_fabric.device_memory import DeviceRange
from kvferry_fabric.errors import FabricError, OutOfBoundsError
from kvferry_fabric.events import DomainStats, EngineStats, Event, EventKind
from kvferry_fabric.handles import LayerCounter, MemoryRegion, Peer, _Handle, own
from kvferry_fabric.host import sharing_scope
from kvferry_fabric.looping import Looping
from kvferry_fabric.native import NativeEngine
from kvferry_fabric.providers import LOCAL, choose
from kvferry_fabric.runs import Runs
from kvferry_fabric.schedule import ChunkSchedule, PagedWrite, timeout_ns
from kvferry_fabric.shared_memory import SharedMemory
from kvferry_fabric.topology.cpuset import MOST_CPUS
from kvferry_fabric.transfers import Transfer

_BATCH = 64
_ADDRESS_ROOM = 256
_REMOTES_KEPT = 256
_FAULTS = {"corrupt": 1, "delay": 2, "fail": 3}
_REFUSED = {22, 34}
"""EINVAL and ERANGE: the description of a transfer is at fault."""


def _too_large(wrong: OverflowError) -> OutOfBoundsError:
    return OutOfBoundsError(f"a transfer's numbers must not be negative and fit 64 bits: {wrong}", 34)


def _distinct(domains: Sequence[str]) -> tuple[str, ...]:
    if len(domains) > MAX_DOMAINS or len(set(domains)) < len(domains):
        msg = f"an engine has up to {MAX_DOMAINS} domains, each another; asked for {', '.join(domains)}"
        raise FabricError(msg)
    return tuple(domains)


def _sorted(cpus: Collection[int]) -> list[int]:
    wrong = [cpu for cpu in cpus if not 0 <= cpu < MOST_CPUS]
    if wrong:
        msg = f"there is no CPU {wrong[0]}"
        raise FabricError(msg)
    return sorted(set(cpus))


def _remote(memory: MemoryDescriptor) -> dict[str, Any]:
    if memory.provider == LOCAL:
        return {"length": memory.length, "local_key": memory.domains[0].key}
    keys = [{"base": domain.base, "key": domain.key} for domain in memory.domains]
    local_key = memory.local.key if memory.local else 0
    return {"length": memory.length, "domains": len(keys), "keys": keys, "local_key": local_key}


class TransferEngine(Looping):
    """Moves pages to other engines with one-sided writes, and counts the pages that arrive.

    Safe to use from several threads; close() is the exception, no other call may be running then. Nothing here holds
    the GIL while it waits, and no Python runs between a layer's end and its writes.
    """

    def __init__(
        self,
        provider: str = "auto",
        *,
        incarnation: int,
        trace: bool = False,
        spin_us: int = 50,
        max_write_bytes: int = 1 << 20,
        bind: str = "127.0.0.1",
        domains: Sequence[str] = (),
        gather: int = 0,
        window: int = 128,
        window_bytes: int = 0,
        stall_seconds: float = 2.0,
        silence_seconds: float = 5.0,
        device_memory: bool = False,
        cpus: Collection[int] = (),
    ) -> None:
        """Open an endpoint in every domain and start the thread of them all.

        Args:
            provider: tcp, net, shm, efa, verbs; local: shared memory, on this host alone; or auto: the best present of
                efa, verbs, tcp, and shared memory for what lies in it and for peers that can map it.
            incarnation: number of this start of the node; goes into every descriptor.
            trace: keep per-layer times of each transfer (Event.layers).
            spin_us: how long the thread spins after the last progress before it sleeps.
            max_write_bytes: neighbouring pages are merged into writes of up to this size.
            bind: local address, for providers over IP; the one domain, unless `domains` names several.
            domains: local addresses, one for each domain (NIC) to write and listen on; at most 8.
            gather: scattered pages in one write; 0 means as many as the provider takes.
            window: writes in flight in a domain at most, over all transfers.
            window_bytes: no more is posted to a domain while this many bytes are in flight there; 0: as it needs.
            silence_seconds: a connection that confirms none of its writes for this long is cut; their transfers fail.
                One from a peer is closed when its host gives no sign of life for four times as long.
            device_memory: memory of GPUs may be registered, which not every provider takes. Peers on this host are
                then written to through the provider, too: only it reads a GPU's memory.
            stall_seconds: a transfer that cannot post anything for this long, because its peer takes nothing, fails.
            cpus: logical CPUs to pin the thread to, before it opens anything; none: it runs wherever the caller may.

        Raises FabricUnavailableError if the extension or provider is missing, FabricError if it cannot be opened, or if
        this process may not run on one of `cpus`.
        """
        binds = _distinct(domains) if domains else (bind,)
        self.provider = choose(provider, binds[0])
        self.binds = () if self.provider == LOCAL else binds
        """Local address of each domain."""
        self.incarnation = incarnation
        options = {
            "spin_ns": spin_us * 1000,
            "max_write_bytes": max_write_bytes,
            "window_bytes": window_bytes,
            "window": window,
            "gather": gather,
            "stall_ns": int(stall_seconds * 1e9),
            "silence_ns": int(silence_seconds * 1e9),
            "trace": trace,
            "local": provider in {"auto", LOCAL} and not device_memory,
            "device_memory": device_memory,
        }
        self._native = NativeEngine(options, self.provider, self.binds, _sorted(cpus))
        # At interpreter exit, or when nobody refers to the engine: its thread must not outlive the memory it reads.
        self._finalizer = weakref.finalize(self, self._native.close)
        self._trace = trace
        self._handles: set[_Handle] = set()
        self._transfers: dict[int, Transfer] = {}  # that have not ended
        self._remotes: dict[int, tuple[MemoryDescriptor, Any]] = {}
        self._lock = Lock()
        self._events = self._native.ffi.new("kf_event[]", _BATCH)
        self.seat = self._native.ffi.string(self._native.lib.kf_seat(self._native.pointer)).decode()
        """Where engines on this host find this one; "" if they are to take its domains."""
        domain_addresses = tuple(self._read_address(index) for index in range(len(self.binds)))
        self.addresses = domain_addresses or (self.seat,)
        """fi_getname of each domain's endpoint, in hex; with provider local, the seat."""

    @property
    def pairing(self) -> str:
        """What two engines must have in common to exchange pages: the provider, and with local the host too."""
        return f"{LOCAL}@{sharing_scope()}" if self.provider == LOCAL else self.provider

    def _read_address(self, domain: int) -> str:
        ffi, lib = self._native.ffi, self._native.lib
        room, length = ffi.new("unsigned char[]", _ADDRESS_ROOM), ffi.new("uint32_t *")
        code = lib.kf_address(self._native.pointer, domain, room, _ADDRESS_ROOM, length)
        self._native.check(code, "endpoint address")
        return bytes(ffi.buffer(room, length[0])).hex()

    def register(self, memory: memoryview | SharedMemory | DeviceRange) -> MemoryRegion:
        """Register writable, contiguous memory and keep it alive. Each registration has keys of its own.

        Shared memory can then be written to by peers on this host too, if this engine has a seat. Closing its region
        raises FabricError with EAGAIN, and leaves it open, if a peer was stopped in the middle of a copy to it.
        """
        identity = {"provider": self.provider, "addresses": self.addresses, "incarnation": self.incarnation}
        return MemoryRegion(self._native, self._handles, memory, identity, self.seat)

    def connect(self, addresses: tuple[str, ...], seat: str = "") -> Peer:
        """Prepare to write to the engine with these addresses, one for each of its domains.

        If it can be reached at `seat`, it is on this host, and its shared memory is written to without a domain. Raises
        FabricError if one of the addresses is none of this provider and of this engine's address family, or, with
        provider local, if nobody is found there.
        """
        if self.provider == LOCAL:
            return Peer(self._native, self._handles, addresses, (), "".join(addresses))
        return Peer(self._native, self._handles, addresses, addresses, seat)

    def new_counter(self, word: memoryview | None = None) -> LayerCounter:
        """Return a layer counter that stands at 0, or at what `word` holds.

        `word`: 8 writable bytes, aligned, which somebody else may raise without a word to the fabric, such as a GPU;
        it is looked at every 20 us while a transfer follows it. Raises ValueError or FabricError if it is none.
        """
        return LayerCounter(self._native, self._handles, word)

    def expect(self, slot: int, generation: int, pages: int) -> None:
        """Arm a slot: ARRIVED is reported when `pages` pages have come. With 0 pages that is at once.

        Stays armed until disarm(), so that an overrun is noticed. Raises FabricError if it is armed already.
        """
        code = self._native.lib.kf_expect(self._native.pointer, slot, generation, pages)
        self._native.check(code, f"slot {slot}, generation {generation} cannot be armed")

    def disarm(self, slot: int, generation: int) -> bool:
        """Stop counting for a slot; its events that have not been polled are dropped. False if it was not armed so."""
        return bool(self._native.check(self._native.lib.kf_disarm(self._native.pointer, slot, generation), "disarm"))

    def arrived(self, slot: int) -> int:
        """Pages that have arrived for a slot since it was armed."""
        return int(self._native.lib.kf_arrived(self._native.pointer, slot))

    def schedule_layers(self, chunk: ChunkSchedule, *, deadline: float | None = None) -> Transfer:
        """Register a chunk: each layer's pages are written once its counter says so.

        `deadline`: seconds from now after which the transfer fails, with ETIMEDOUT, if it has not ended; as always,
        its event comes when nothing of it is in flight. An empty chunk is DONE at once. Raises OutOfBoundsError,
        before anything is posted, if a page leaves either region, and FabricError if the descriptor is not of this
        peer and provider; ValueError for a deadline that is not positive, or above a year.
        """
        self._check_remote(chunk.remote, chunk.peer)
        runs = np.ascontiguousarray(chunk.runs, dtype=np.int32).reshape(-1, 3)
        native, error = self._native, self._native.new_error()
        fields = {**self._fields(chunk, runs), "timeout_ns": timeout_ns(deadline)}
        try:
            plan = native.ffi.new("kf_schedule *", fields)
        except OverflowError as wrong:
            raise _too_large(wrong) from wrong
        with self._lock:  # the event may be polled before this thread goes on
            number = int(native.lib.kf_start(native.pointer, plan, error))
            return self._started(number, chunk.peer, chunk.layers, deadline, error)

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
        """Write `length` bytes at once, as one page of the slot. Deadline and errors as in schedule_layers()."""
        self._check_remote(remote, peer)
        native, error = self._native, self._native.new_error()
        source, target = own(native, region, MemoryRegion), own(native, peer, Peer)
        timeout = timeout_ns(deadline)
        try:
            with self._lock:  # the event may be polled before this thread goes on
                number = int(
                    native.lib.kf_write_one(
                        native.pointer, source, source_offset, target,
                        self._native_remote(remote), destination_offset, length, slot, generation,
                        timeout, error,
                    )
                )  # fmt: skip
                return self._started(number, peer, 1, deadline, error)
        except OverflowError as wrong:
            raise _too_large(wrong) from wrong

    def write_pages(self, pages: PagedWrite, *, deadline: float | None = None) -> Transfer:
        """Write pages of every layer at once. Deadline and errors as in schedule_layers()."""
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
        """Write no bytes, and count as `pages` pages of the slot, 0 to 4095. The key of `remote` must be open.

        Deadline and errors as in schedule_layers(). FabricError with provider shm, which never completes such a write.
        """
        self._check_remote(remote, peer)
        if self.provider == "shm":
            msg = "provider shm does not complete writes of no bytes"
            raise FabricError(msg, 95)
        native, error, timeout = self._native, self._native.new_error(), timeout_ns(deadline)
        target, there = own(native, peer, Peer), self._native_remote(remote)
        try:
            with self._lock:  # the event may be polled before this thread goes on
                number = int(
                    native.lib.kf_write_immediate(
                        native.pointer, target, there, slot, generation, pages, timeout, error
                    )
                )
                return self._started(number, peer, 1, deadline, error)
        except OverflowError as wrong:
            raise _too_large(wrong) from wrong

    def _native_remote(self, memory: MemoryDescriptor) -> Any:  # noqa: ANN401 - cdata
        # Made once for a descriptor: that takes 4 us, a tenth of a small write's way. Kept with it, so that its id
        # stays its own.
        known = self._remotes.get(id(memory))
        if known is None:
            if len(self._remotes) >= _REMOTES_KEPT:
                self._remotes.clear()
            known = self._remotes[id(memory)] = (memory, self._native.ffi.new("kf_remote *", _remote(memory)))
        return known[1]

    def _started(
        self, number: int, peer: PeerHandle, layers: int, deadline: float | None, error: Any  # noqa: ANN401 - cdata
    ) -> Transfer:  # fmt: skip
        if not number:
            kind = OutOfBoundsError if -error.code in _REFUSED else FabricError
            raise kind(*self._native.describe(error))
        transfer = Transfer(self._native, number, peer.addresses[0], deadline, layers if self._trace else 0)
        self._transfers[number] = transfer
        return transfer

    def _check_remote(self, remote: MemoryDescriptor, peer: PeerHandle) -> None:
        if (remote.provider, remote.addresses) != (self.provider, peer.addresses):
            msg = (
                f"memory of {remote.provider} endpoints {', '.join(remote.addresses)} cannot be written through "
                f"{self.provider} peer {', '.join(peer.addresses)}"
            )
            raise FabricError(msg)

    def _fields(self, chunk: ChunkSchedule, runs: Runs) -> dict[str, Any]:
        return {
            "counter": own(self._native, chunk.counter, LayerCounter) if chunk.counter else self._native.ffi.NULL,
            "first_value": chunk.first_value,
            "layers": chunk.layers,
            "slot": chunk.slot,
            "generation": chunk.generation,
            "run_count": len(runs),
            "region": own(self._native, chunk.region, MemoryRegion),
            "peer": own(self._native, chunk.peer, Peer),
            "remote": _remote(chunk.remote),
            "source_start": chunk.source_start,
            "destination_start": chunk.destination_start,
            "source_layer_stride": chunk.source_layer_stride,
            "destination_layer_stride": chunk.destination_layer_stride,
            "source_page_stride": chunk.source_page_stride,
            "destination_page_stride": chunk.destination_page_stride,
            "source_offset": chunk.source_offset,
            "destination_offset": chunk.destination_offset,
            "length": chunk.length,
            "runs": self._native.ffi.from_buffer("kf_run[]", runs),
        }

    def poll(self) -> list[Event]:
        """Return the events since the last call; does not wait."""
        native = self._native
        with self._lock:
            events: list[Event] = []
            while True:
                count = native.lib.kf_poll_events(native.pointer, self._events, _BATCH)
                events.extend(self._event(self._events[i]) for i in range(count))
                if count < _BATCH:
                    return events

    def _event(self, raw: Any) -> Event:  # noqa: ANN401 - cdata
        if raw.transfer:
            return self._transfers.pop(raw.transfer).finish(raw)
        return Event(
            kind=EventKind(raw.kind),
            slot=raw.slot,
            generation=raw.generation,
            pages=raw.pages,
            first_arrival_ns=raw.first_ns,
            last_arrival_ns=raw.last_ns,
        )

    @property
    def event_fd(self) -> int:
        """A file descriptor that is readable while events wait to be polled."""
        return int(self._native.lib.kf_event_fd(self._native.pointer))

    def stats(self) -> EngineStats:
        """Return the engine's counts."""
        values = self._native.ffi.new("kf_stats_values *")
        self._native.lib.kf_stats(self._native.pointer, values)
        return EngineStats(**{name: getattr(values, name) for name in EngineStats._fields})

    def domain_stats(self) -> tuple[DomainStats, ...]:
        """Return the counts of each domain."""
        values = self._native.ffi.new("kf_domain_values *")
        stats = []
        for index in range(len(self.binds)):
            self._native.check(self._native.lib.kf_domain_stats(self._native.pointer, index, values), "domain")
            stats.append(DomainStats(**{name: getattr(values, name) for name in DomainStats._fields}))
        return tuple(stats)

    def fault(self, kind: str, value: int) -> None:
        """Inject a fault, for tests: "corrupt" or "fail" the value-th write from now, "delay" all by value ns; 0: none.

        Raises ValueError for another kind.
        """
        if kind not in _FAULTS:
            msg = f"fault {kind!r} is not one of {', '.join(_FAULTS)}"
            raise ValueError(msg)
        self._native.check(self._native.lib.kf_fault(self._native.pointer, _FAULTS[kind], value), "fault")

    def close(self) -> None:
        """Stop posting, wait up to a second for writes in flight, and free everything. Handles become unusable."""
        if self._native.closed:
            return
        self.detach()
        self._native.close()
        for handle in list(self._handles):
            handle.forget()
        for transfer in self._transfers.values():
            transfer.forget()
        self._transfers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
