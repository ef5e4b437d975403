"""What a memory engine gives out."""

from typing import TYPE_CHECKING, Self

from kvferry_proto.memory import DomainMemory, MemoryDescriptor

from kvferry_fabric.errors import FabricError

if TYPE_CHECKING:
    from kvferry_fabric.in_memory.engine import MemoryEngine


class Handle:
    """Closing is idempotent; using it afterwards raises FabricError."""

    what = "handle"

    def __init__(self, engine: "MemoryEngine") -> None:
        self.engine = engine
        self.open = True
        engine.handles.append(self)

    def check_open(self) -> Self:
        """Return this. Raises FabricError if it or its engine is closed."""
        if not self.open:
            msg = f"this {self.what} is closed"
            raise FabricError(msg)
        return self

    def close(self) -> None:
        """Give it back. Raises FabricError while a transfer needs it."""
        if self.open and self._is_busy():
            msg = f"this {self.what} is still used by transfers"
            raise FabricError(msg)
        self.forget()

    def _is_busy(self) -> bool:
        return self.engine.uses(self)

    def forget(self) -> None:
        """Close whatever uses it."""
        if self.open:
            self.open = False
            self.engine.handles.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Region(Handle):
    """Registered memory."""

    what = "memory region"

    def __init__(self, engine: "MemoryEngine", buffer: memoryview, key: int) -> None:
        if buffer.readonly or not buffer.contiguous:
            msg = "memory to register must be writable and contiguous"
            raise BufferError(msg)
        self.memory = buffer.cast("B")
        self.descriptor = MemoryDescriptor(
            provider=engine.provider, length=self.memory.nbytes, incarnation=engine.incarnation,
            domains=(DomainMemory(address=engine.address, base=0, key=key),),
        )  # fmt: skip
        super().__init__(engine)


class NoMemory(Region):
    """What a write of no bytes is read from; nobody is given it."""

    def __init__(self, engine: "MemoryEngine") -> None:
        super().__init__(engine, memoryview(bytearray()), 0)
        self.forget()


class PeerLink(Handle):
    """An engine that can be written to. Closing it takes effect when its transfers have ended."""

    what = "peer"

    def __init__(self, engine: "MemoryEngine", addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        super().__init__(engine)

    def _is_busy(self) -> bool:
        return False


class Counter(Handle):
    """A layer counter: bumping it posts what has become free to go, at once."""

    what = "layer counter"

    def __init__(self, engine: "MemoryEngine") -> None:
        self._value = 0
        super().__init__(engine)

    @property
    def value(self) -> int:
        """Present value."""
        self.check_open()
        return self._value

    def bump(self, n: int = 1) -> None:
        """Add n."""
        self.check_open()
        self._value += n
        self.engine.follow()
