"""Hidden states on their way out: a slot for each prompt whose decoder drafts, from its last pass to its last write.

free ──last chunk registered──▶ held ──the pass has written the row──▶ being sent ──request over──▶ free
"""

import torch
from kvferry_engine.context_slots import ContextSlots, state_checksum
from kvferry_fabric import Fabric, TransferHandle

from kvferry_prefiller.request import Request


class Contexts:
    """Owns the prefiller's context slots. All in the event loop's thread, but for `put`."""

    def __init__(self, fabric: Fabric, slots: ContextSlots, count: int) -> None:
        """`count`: requests that may hold pages at once; so many rows `slots` has, and no request waits for one."""
        self._fabric = fabric
        self._slots = slots
        self._region = fabric.register(slots.buffer)
        self._free = list(range(count))

    @property
    def row_bytes(self) -> int:
        """Bytes of a hidden state."""
        return self._slots.row_bytes

    def hold(self, request: Request) -> None:
        """Draw a slot."""
        request.context_slot = self._free.pop()

    def put(self, slot: int, state: torch.Tensor) -> None:
        """Write the hidden state after a prompt's last token, [E]; in the forward thread, its request in a step."""
        self._slots.put(slot, state)

    def send(self, request: Request) -> TransferHandle:
        """Write the row to the decoder's slot. Raises FabricError."""
        order, slot = request.order, request.context_slot
        assert slot is not None
        assert order.context is not None
        return self._fabric.write(
            peer=request.peers[0],
            region=self._region,
            source_offset=self._slots.offset(slot),
            remote=order.context,
            destination_offset=self._slots.offset(order.slot),
            length=self._slots.row_bytes,
            slot=order.slot,
            generation=order.generation,
        )

    def checksum(self, request: Request) -> int | None:
        """Checksum of the row that was sent; None where none was."""
        return None if request.context_slot is None else state_checksum(self._slots.take(request.context_slot))

    def release(self, request: Request) -> None:
        """Give the slot back, if one is held: once no transfer of the request is left."""
        if request.context_slot is not None:
            self._free.append(request.context_slot)
            request.context_slot = None
