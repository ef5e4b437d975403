"""The messenger's receiving half: transfers on their way into this decoder.

A transfer holds a slot, pages, and the right of its prefiller to write to them. It is armed before the prefiller
hears of it, so no arrival is ever early, and it ends in one of three ways:

    EXPECTING ──count reached──▶ ARRIVED            pages belong to the request again
        │
        └─cancel, failure, prefiller lost──▶ QUARANTINED ──confirmed, or its memory key closed──▶ over

In quarantine the slot's counter is off, and slot and pages stay out of use: a late write can still land there. The
way out is the prefiller's word that nothing is in flight, or, if the prefiller is gone, the end of the memory key
that it was given: the pool is registered again under a new key for new transfers, and the old key is closed when
the last healthy transfer that uses it is over. If the pool can't be registered twice, new transfers wait for that.
"""

import enum
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry_engine.allocator import PageAllocator
from kvferry_fabric import Fabric, FabricError, RegionHandle
from kvferry_node.logs import Throttle, get_logger
from kvferry_node.states import StateMachine
from kvferry_proto.nodes import NodeRef, Peer

from kvferry_decoder.slots import Slot, SlotPool


class TransferState(enum.Enum):
    """Where a transfer is."""

    EXPECTING = enum.auto()
    ARRIVED = enum.auto()
    QUARANTINED = enum.auto()
    OVER = enum.auto()


TRANSFER_MOVES = {
    TransferState.EXPECTING: frozenset({TransferState.ARRIVED, TransferState.QUARANTINED}),
    TransferState.ARRIVED: frozenset({TransferState.OVER}),
    TransferState.QUARANTINED: frozenset({TransferState.OVER}),
}


@dataclass(eq=False)
class MemoryKey:
    """One registration of every rank's pool and of the context slots, and the transfers whose prefillers know it."""

    regions: Sequence[RegionHandle]
    """Of the pools, by rank."""
    context: RegionHandle | None = None
    transfers: set["Transfer"] = field(default_factory=set)
    revoked: bool = False
    """A lost prefiller knows it: no new transfer uses it, and it is closed as soon as no healthy one does."""


@dataclass(eq=False)
class Transfer:
    """KV on its way here for one request."""

    request_id: str
    peer: Peer
    slot: Slot
    key: MemoryKey
    machine: StateMachine[TransferState] = field(
        default_factory=lambda: StateMachine(TransferState.EXPECTING, TRANSFER_MOVES)
    )
    quarantined_pages: list[int] = field(default_factory=list)
    lost: bool = False
    """Its prefiller is gone: nobody will confirm."""
    asked_at: int = 0
    """When the prefiller was last asked to cancel, monotonic ns."""

    @property
    def state(self) -> TransferState:
        """Present state."""
        return self.machine.state

    def answers(self, sender: NodeRef, slot: int, generation: int) -> bool:
        """Whether a message from `sender` about this slot and generation is about this transfer."""
        return self.peer.ref == sender and (self.slot.number, self.slot.generation) == (slot, generation)

    @property
    def awaits_confirmation(self) -> bool:
        """Whether only its prefiller's word keeps it in quarantine."""
        return self.state is TransferState.QUARANTINED and not self.lost


class Receiver:
    """Owns slots, memory keys and the quarantine of a decoder."""

    def __init__(
        self,
        fabric: Fabric,
        register: Callable[[], Sequence[RegionHandle]],
        allocator: PageAllocator,
        slots: SlotPool,
        register_context: Callable[[], RegionHandle] | None = None,
    ) -> None:
        """`register` and `register_context` register pools and context slots, where there are any, under new keys."""
        self._fabric = fabric
        self._register = register
        self._register_context = register_context
        self._allocator = allocator
        self.slots = slots
        self._throttle = Throttle(5.0)
        self._key = self._new_key()
        self._revoked: list[MemoryKey] = []
        self._by_slot: dict[int, Transfer] = {}

    @property
    def transfers(self) -> list[Transfer]:
        """All that hold a slot."""
        return list(self._by_slot.values())

    def can_expect(self) -> bool:
        """Whether a slot is free, and there is a key that a prefiller may be told."""
        return self.slots.can_draw() and not self._key.revoked

    def expect(self, request_id: str, peer: Peer, arrivals: int) -> Transfer:
        """Draw a slot and arm it for `arrivals` page arrivals; then, not before, may `peer` be told."""
        transfer = Transfer(request_id, peer, self.slots.draw(), self._key)
        self._fabric.expect(*transfer.slot, arrivals)
        self._key.transfers.add(transfer)
        self._by_slot[transfer.slot.number] = transfer
        return transfer

    def find(self, slot: int, generation: int) -> Transfer | None:
        """Return the transfer that has this slot now, unless it is of another generation."""
        transfer = self._by_slot.get(slot)
        return transfer if transfer is not None and transfer.slot.generation == generation else None

    def arrived(self, transfer: Transfer) -> None:
        """Every page is here: the count says so, and the prefiller writes each page once."""
        self._fabric.disarm(*transfer.slot)
        transfer.machine.move(TransferState.ARRIVED)
        self._release(transfer)

    def abandon(self, transfer: Transfer, pages: list[int]) -> None:
        """Stop expecting; `pages` and slot go into quarantine until `confirm`, or until the key is closed."""
        self._fabric.disarm(*transfer.slot)
        self._allocator.quarantine(pages)
        transfer.quarantined_pages = pages
        transfer.machine.move(TransferState.QUARANTINED)

    def confirm(self, transfer: Transfer) -> None:
        """The prefiller says that nothing of it is in flight, and nothing will be."""
        if transfer.state is TransferState.QUARANTINED:
            self._release(transfer)

    def revoke(self, lost: list[Transfer]) -> None:
        """Make the keys useless that the prefiller of these abandoned transfers knows."""
        for transfer in lost:
            transfer.lost = True
            if not transfer.key.revoked:
                transfer.key.revoked = True
                self._revoked.append(transfer.key)
        self._renew()
        self.close_revoked()

    def _renew(self) -> None:
        """Have a key for new transfers; none, for now, if the pool can't be registered beside its old one."""
        if not self._key.revoked:
            return
        try:
            self._key = self._new_key()
        except FabricError as error:
            if (held := self._throttle.passes("register")) is not None:
                get_logger().warning("no memory key: prefillers are not asked for now", why=str(error), held_back=held)

    def _new_key(self) -> MemoryKey:
        key = MemoryKey(self._register())
        if self._register_context is not None:
            try:
                key.context = self._register_context()
            except FabricError:
                _close(key)
                raise
        return key

    def _release(self, transfer: Transfer) -> None:
        transfer.machine.move(TransferState.OVER)
        if transfer.quarantined_pages:
            self._allocator.release_quarantine(transfer.quarantined_pages)
        del self._by_slot[transfer.slot.number]
        transfer.key.transfers.remove(transfer)
        self.slots.give_back(transfer.slot)
        if transfer.key.revoked:
            self.close_revoked()

    def close_revoked(self) -> None:
        """Close the revoked keys that no healthy transfer needs, and have a new one; to be called again now and then.

        A key stays, and with it the quarantine, while a lost prefiller on this host is stopped in the middle of a copy:
        once it runs again it may write the rest of that piece.
        """
        for key in self._revoked[:]:
            # Looked at one by one: releasing the transfers of a key comes back here, and may close the others.
            if key in self._revoked and all(transfer.lost for transfer in key.transfers) and _close(key):
                self._end(key)
        self._renew()

    def _end(self, key: MemoryKey) -> None:
        self._revoked.remove(key)
        for transfer in list(key.transfers):
            self._release(transfer)


def _close(key: MemoryKey) -> bool:
    """Close all that can be closed of a key's registrations; whether that was all of them."""
    regions = [*key.regions] if key.context is None else [*key.regions, key.context]
    closed = [_close_region(region) for region in regions]
    return all(closed)


def _close_region(region: RegionHandle) -> bool:
    try:
        region.close()
    except FabricError as error:
        if error.code != errno.EAGAIN:
            raise
        return False
    return True
