"""What lies between memory engines: the writes on their way, and what the test lets become of them."""

import errno
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry_fabric.errors import FabricError

if TYPE_CHECKING:
    from kvferry_fabric.in_memory.engine import MemoryEngine
    from kvferry_fabric.in_memory.transfer import Transfer


@dataclass(eq=False)
class Write:
    """One write on its way: neighbouring pages of one layer."""

    transfer: "Transfer"
    layer: int
    pieces: list[tuple[int, bytes]]
    """Offset in the target region, and the bytes that were there when it was posted, of each page."""
    landed: bool = False


@dataclass
class Network:
    """Engines by address. Automatic: a write lands and completes as soon as it is posted."""

    automatic: bool = True
    engines: dict[str, "MemoryEngine"] = field(default_factory=dict)
    flying: list[Write] = field(default_factory=list)
    """Posted, and not over: what a step-by-step test acts on, in any order that it likes."""
    _serial: int = 0

    def join(self, engine: "MemoryEngine") -> str:
        """Take an engine in; return its address. No address is ever used twice."""
        self._serial += 1
        address = f"mem{self._serial}".encode().hex()
        self.engines[address] = engine
        return address

    def leave(self, engine: "MemoryEngine") -> None:
        """An engine is closed: nothing that it posted lands any more, and what was on its way to it fails."""
        self.engines.pop(engine.address, None)
        self.flying = [write for write in self.flying if write.transfer.engine is not engine]
        self._fail_all_to(engine.address)

    def lose(self, address: str) -> None:
        """As if the process at this address had been killed: it vanishes with all that it has posted."""
        engine = self.engines.get(address)
        if engine is None:
            msg = f"nobody is at {address}"
            raise FabricError(msg)
        self.leave(engine)
        for other in list(self.engines.values()):
            other.peer_is_lost(address, "connection to the receiver was lost: the receiver has died")

    def cut(self, engine: "MemoryEngine", address: str) -> None:
        """What this engine has on its way there never lands."""
        self.flying = [
            write for write in self.flying if (write.transfer.engine, write.transfer.peer) != (engine, address)
        ]

    def post(self, write: Write) -> None:
        """Send a write on its way."""
        self.flying.append(write)
        if self.automatic:
            self.complete(write)

    def land(self, write: Write) -> None:
        """Its bytes come to the target's memory, and its immediate after them. A revoked key makes it fail instead."""
        if write.landed:
            return
        target = self.engines.get(write.transfer.peer)
        region = target.region_of(write.transfer.plan.remote.domains[0].key) if target else None
        if target is None or region is None:
            self.fail(write, errno.EACCES if target else errno.ECONNRESET)
            return
        write.landed = True
        for offset, data in write.pieces:
            region.memory[offset : offset + len(data)] = data
        plan = write.transfer.plan
        target.count(plan.slot, plan.generation, len(write.pieces))

    def complete(self, write: Write) -> None:
        """The sender learns that it has landed."""
        self.land(write)
        if write in self.flying:
            self.flying.remove(write)
            write.transfer.completed()

    def fail(self, write: Write, error: int = errno.EIO) -> None:
        """The sender learns that it did not complete; whether it has landed stays as it is."""
        self.flying.remove(write)
        write.transfer.failed(error, f"write of layer {write.layer} did not complete")

    def drop(self, write: Write) -> None:
        """It never lands, and nobody is told; its transfer stays in flight until its peer is lost."""
        self.flying.remove(write)

    def run(self, seed: int | None = None) -> None:
        """Complete all that is flying, and what is posted meanwhile; in an order drawn from `seed` if there is one."""
        draw = random.Random(seed)
        while self.flying:
            self.complete(self.flying[0] if seed is None else draw.choice(self.flying))

    def _fail_all_to(self, address: str) -> None:
        for write in [write for write in self.flying if write.transfer.peer == address]:
            self.fail(write, errno.ECONNRESET)
