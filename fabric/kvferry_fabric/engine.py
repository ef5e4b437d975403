"""TransferEngine: the domains (NICs) of a device group, with the C thread that posts to them and counts."""

import weakref
from collections.abc import Collection, Sequence
from typing import Self

from kvferry_proto.memory import MAX_DOMAINS

from kvferry_fabric.device_memory import DeviceRange
from kvferry_fabric.errors import FabricError
from kvferry_fabric.events import DomainStats, EngineStats
from kvferry_fabric.handles import LayerCounter, MemoryRegion, Peer, _Handle, forget
from kvferry_fabric.host import sharing_scope
from kvferry_fabric.native import NativeEngine
from kvferry_fabric.providers import LOCAL, choose
from kvferry_fabric.shared_memory import SharedMemory
from kvferry_fabric.topology.cpuset import MOST_CPUS
from kvferry_fabric.writing import Writing

_ADDRESS_ROOM = 256
_FAULTS = {"corrupt": 1, "delay": 2, "fail": 3}


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


class TransferEngine(Writing):
    """Moves pages to other engines with one-sided writes, and counts the pages that arrive.

    Safe to use from several threads; close(), of the engine or of a handle, is the exception: no call that uses it may
    be running then. Nothing here holds the GIL while it waits, and no Python runs between a layer's end and its writes.
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
        chosen = choose(provider, binds[0])
        self.binds = () if chosen == LOCAL else binds
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
        native = NativeEngine(options, chosen, self.binds, _sorted(cpus))
        # At interpreter exit, or when nobody refers to the engine: its thread must not outlive the memory it reads.
        self._finalizer = weakref.finalize(self, native.close)
        super().__init__(native, chosen, trace=trace)
        self._handles: set[_Handle] = set()
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

    def forget(self, addresses: tuple[str, ...], seat: str = "") -> None:
        """The engine there is held to be gone: transfers to it fail, and no connection to it is kept.

        Otherwise a host that vanished without a word keeps a socket of ours until that is next used. Connecting there
        again is allowed, as it may have stood still only. Raises FabricError if an address is not hexadecimal.
        """
        if self.provider == LOCAL:
            addresses, seat = (), "".join(addresses)
        forget(self._native, addresses, seat)

    def new_counter(self, word: memoryview | None = None) -> LayerCounter:
        """Return a layer counter that stands at 0, or at what `word` holds.

        `word`: 8 writable bytes, aligned, which somebody else may raise without a word to the fabric, such as a GPU;
        it is looked at every 20 us while a transfer follows it. Raises ValueError or FabricError if it is none.
        """
        return LayerCounter(self._native, self._handles, word)

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
