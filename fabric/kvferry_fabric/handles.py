"""What an engine gives out: memory regions, peers and layer counters. Each is closed by its user, or by the engine."""

import ctypes
from typing import Any, Self, TypeVar

from kvferry_proto.memory import DomainMemory, LocalMemory, MemoryDescriptor

from kvferry_fabric.device_memory import DeviceRange
from kvferry_fabric.errors import FabricError
from kvferry_fabric.native import NativeEngine
from kvferry_fabric.providers import LOCAL
from kvferry_fabric.shared_memory import SharedMemory


class _Handle:
    """A C object of an engine; closing is idempotent, and using it afterwards raises FabricError."""

    what = "handle"

    def __init__(self, native: NativeEngine, owner: set["_Handle"], handle: Any) -> None:  # noqa: ANN401 - cdata
        self._native = native
        self._owner = owner
        self._handle: Any = handle
        owner.add(self)

    @property
    def handle(self) -> Any:  # noqa: ANN401 - a cdata pointer
        """The C object. Raises FabricError if this or its engine is closed."""
        if self._handle is None or self._native.closed:
            msg = f"this {self.what} is closed"
            raise FabricError(msg)
        return self._handle

    def of(self, native: NativeEngine) -> Any:  # noqa: ANN401 - a cdata pointer
        """The C object. Raises FabricError if this is closed, or was not given out by this engine.

        Whether the engine is closed is not looked at: who calls it asks for its pointer.
        """
        if self._native is not native:
            msg = f"this is no {self.what} of this engine"
            raise FabricError(msg)
        return self.handle if self._handle is None else self._handle

    def close(self) -> None:
        """Give it back. Raises FabricError, and stays open, while a transfer still needs it."""
        if self._handle is None:
            return
        if not self._native.closed:
            error = self._native.new_error()
            if self._free(error) < 0:
                self._native.fail(error)
        self.forget()

    def forget(self) -> None:
        """Drop the C object without freeing it: its engine does."""
        self._handle = None
        self._owner.discard(self)

    def _free(self, error: Any) -> int:  # noqa: ANN401 - cdata
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


H = TypeVar("H", bound=_Handle)


def own(native: NativeEngine, handle: object, kind: type[H]) -> Any:  # noqa: ANN401 - a cdata pointer
    """The C object of a handle. Raises FabricError if it is closed, or was not given out by this engine."""
    if isinstance(handle, kind):
        return handle.of(native)
    msg = f"this is no {kind.what} of this engine"
    raise FabricError(msg)


def _described(
    remote: Any,  # noqa: ANN401 - cdata
    seat: str,
    *,
    provider: str,
    addresses: tuple[str, ...],
    incarnation: int,
) -> MemoryDescriptor:
    if provider == LOCAL:
        own_seat = DomainMemory(address=seat, base=0, key=remote.local_key)
        return MemoryDescriptor(provider=provider, length=remote.length, incarnation=incarnation, domains=(own_seat,))
    domains = tuple(
        DomainMemory(address=address, base=remote.keys[i].base, key=remote.keys[i].key)
        for i, address in enumerate(addresses)
    )
    local = LocalMemory(seat=seat, key=remote.local_key) if remote.local_key else None
    return MemoryDescriptor(
        provider=provider, length=remote.length, incarnation=incarnation, domains=domains, local=local
    )


class MemoryRegion(_Handle):
    """Registered memory; keeps its buffer alive. Closing it makes writes with its key fail."""

    what = "memory region"

    def __init__(
        self,
        native: NativeEngine,
        owner: set[_Handle],
        memory: memoryview | SharedMemory | DeviceRange,
        identity: dict[str, Any],
        seat: str,
    ) -> None:
        """Register `memory` (writable, contiguous). `identity`: provider, addresses and incarnation of the engine."""
        error = native.new_error()
        self._kept: Any = memory
        self._pinned: Any = None
        if isinstance(memory, DeviceRange):
            handle = native.lib.kf_register_device(native.pointer, _in_device(native, memory), error)
        else:
            buffer, fd = (memory.buffer, memory.fd) if isinstance(memory, SharedMemory) else (memory, -1)
            self._pinned = native.ffi.from_buffer("unsigned char[]", buffer, require_writable=True)
            handle = native.lib.kf_register(native.pointer, self._pinned, len(self._pinned), fd, 0, error)
        if not handle:
            self._let_go()
            native.fail(error)
        remote = native.ffi.new("kf_remote *")
        native.lib.kf_region_remote(handle, remote)
        self.descriptor = _described(remote, seat, **identity)
        super().__init__(native, owner, handle)

    def _free(self, error: Any) -> int:  # noqa: ANN401 - cdata
        return int(self._native.lib.kf_unregister(self._native.pointer, self._handle, error))

    def forget(self) -> None:
        """Drop the C object, and let go of the buffer."""
        if self._handle is not None:
            self._let_go()
        super().forget()

    def _let_go(self) -> None:
        self._kept = None
        if self._pinned is not None:
            # Not through the engine, which may be closed, and was not kept yet where registering failed.
            self._pinned.__exit__(None, None, None)
            self._pinned = None


def _in_device(native: NativeEngine, memory: DeviceRange) -> Any:  # noqa: ANN401 - cdata
    dma_buf = -1 if memory.dma_buf is None else memory.dma_buf
    fields = {"address": memory.pointer, "length": memory.length, "device": memory.device, "dma_buf": dma_buf}
    return native.ffi.new("kf_device_memory *", fields)


def _raw(address: str) -> bytes:
    try:
        return bytes.fromhex(address)
    except ValueError as wrong:
        msg = f"peer address {address[:80]!r} is not hexadecimal"
        raise FabricError(msg) from wrong


def _place(native: NativeEngine, addresses: tuple[str, ...], seat: str) -> tuple[Any, ...]:
    """Addresses and seat, as C takes them."""
    raw = [_raw(address) for address in addresses]
    return b"".join(raw), list(map(len, raw)), len(raw), native.ffi.new("char[]", seat.encode())


def forget(native: NativeEngine, addresses: tuple[str, ...], seat: str) -> None:
    """Hold who is there to be gone. Raises FabricError if an address is not hexadecimal."""
    error = native.new_error()
    if native.lib.kf_forget(native.pointer, *_place(native, addresses, seat), error) < 0:
        native.fail(error)


class Peer(_Handle):
    """An engine that can be written to. Connecting to the same addresses again shares the connections."""

    what = "peer"

    def __init__(
        self, native: NativeEngine, owner: set[_Handle], addresses: tuple[str, ...], domains: tuple[str, ...], seat: str
    ) -> None:
        error = native.new_error()
        handle = native.lib.kf_connect(native.pointer, *_place(native, domains, seat), error)
        if not handle:
            native.fail(error)
        self.addresses = addresses
        """fi_getname of each of the peer's endpoints, in hex; with provider local, its seat."""
        super().__init__(native, owner, handle)

    def _free(self, error: Any) -> int:  # noqa: ANN401 - cdata
        return int(self._native.lib.kf_disconnect(self._native.pointer, self._handle, error))


class LayerCounter(_Handle):
    """A 64-bit counter that the model raises by one after each layer; it only ever grows."""

    what = "layer counter"

    def __init__(self, native: NativeEngine, owner: set[_Handle], word: memoryview | None = None) -> None:
        error = native.new_error()
        if word is None:
            handle = native.lib.kf_counter_new(native.pointer, error)
        else:
            self._word = native.ffi.from_buffer("uint64_t[1]", word, require_writable=True)
            handle = native.lib.kf_counter_over(native.pointer, self._word, error)
        if not handle:
            native.fail(error)
        self.address = int(native.lib.kf_counter_address(handle))
        """Address of the 64-bit word, alone in its cache line."""
        self._bump = native.keeping_the_interpreter("kf_counter_bump", ctypes.c_void_p, ctypes.c_uint64)
        self._place = native.address_of(handle)
        super().__init__(native, owner, handle)

    @property
    def value(self) -> int:
        """Present value."""
        return int(self._native.lib.kf_counter_value(self.handle))

    def bump(self, n: int = 1) -> None:
        """Add n with release order: what this thread wrote before is sent after. Wakes the fabric if it sleeps.

        The interpreter is kept: another thread that waits for it would hold it for up to 5 ms, after every layer.
        """
        _ = self.handle  # raises if this is closed
        self._bump(self._place, n)

    def _free(self, error: Any) -> int:  # noqa: ANN401 - cdata
        return int(self._native.lib.kf_counter_free(self._handle, error))
