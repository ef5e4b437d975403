"""The receiver: slots and pages of a transfer stay out of use until no write can reach them."""

import errno

import pytest
from kvferry_decoder.receiver import Receiver, TransferState
from kvferry_decoder.slots import SlotPool
from kvferry_engine.allocator import PageAllocator
from kvferry_fabric import FabricError
from kvferry_node.states import IllegalMoveError
from kvferry_proto.nodes import NodeRef, Peer

ALICE, BOB = (Peer(ref=NodeRef(name, 1), endpoint="tcp://127.0.0.1:1") for name in ("alice", "bob"))


class FakeFabric:
    """Counts armed slots and open registrations, of two ranks' pools, as the engine does."""

    def __init__(self):
        self.armed = set()
        self.regions = []
        self.room = 100
        """Regions that may be registered at once."""

    def expect(self, slot, generation, pages):
        assert slot not in {number for number, _ in self.armed}
        assert pages > 0
        self.armed.add((slot, generation))

    def disarm(self, slot, generation):
        self.armed.remove((slot, generation))

    def register(self):
        if len(self.regions) + 2 > self.room:
            text = "no memory may be locked any more"
            raise FabricError(text, errno.ENOMEM)
        both = [FakeRegion(self), FakeRegion(self)]
        self.regions += both
        return both


class FakeRegion:
    def __init__(self, fabric):
        self.fabric = fabric
        self.refuses = 0
        """errno with which it cannot be closed."""

    def close(self):
        if self.refuses:
            raise FabricError("not now", self.refuses)
        if self in self.fabric.regions:
            self.fabric.regions.remove(self)


@pytest.fixture
def fabric():
    return FakeFabric()


@pytest.fixture
def allocator():
    return PageAllocator(16)


@pytest.fixture
def receiver(fabric, allocator):
    return Receiver(fabric, fabric.register, allocator, SlotPool(4))


def test_arrival_gives_slot_back_and_turns_its_counter_off(receiver, fabric):
    transfer = receiver.expect("a", ALICE, 8)
    assert fabric.armed == {tuple(transfer.slot)}
    receiver.arrived(transfer)
    assert (fabric.armed, receiver.slots.held, receiver.transfers) == (set(), 0, [])


def test_pages_of_a_cancelled_transfer_are_in_quarantine_until_confirmed(receiver, allocator):
    pages = allocator.allocate(5)
    transfer = receiver.expect("a", ALICE, 8)
    receiver.abandon(transfer, pages)
    assert (allocator.quarantined_pages, allocator.free_pages, receiver.slots.held) == (5, 11, 1)
    receiver.confirm(transfer)
    assert (allocator.quarantined_pages, allocator.free_pages, receiver.slots.held) == (0, 16, 0)


def test_a_confirmation_of_a_transfer_still_expected_changes_nothing(receiver):
    transfer = receiver.expect("a", ALICE, 8)
    receiver.confirm(transfer)
    assert transfer.state is TransferState.EXPECTING


def test_a_late_word_about_a_slot_does_not_reach_its_next_user(receiver):
    first = receiver.expect("a", ALICE, 8)
    receiver.arrived(first)
    assert receiver.find(*first.slot) is None


def test_a_transfer_that_arrived_cannot_be_abandoned(receiver):
    transfer = receiver.expect("a", ALICE, 8)
    receiver.arrived(transfer)
    with pytest.raises(IllegalMoveError):
        transfer.machine.move(TransferState.QUARANTINED)


def test_a_lost_prefillers_pages_are_free_when_its_key_is_closed(receiver, allocator, fabric):
    pages = allocator.allocate(5)
    lost = receiver.expect("a", ALICE, 8)
    receiver.abandon(lost, pages)
    old = lost.key.regions
    receiver.revoke([lost])
    assert len(fabric.regions) == 2
    assert not set(fabric.regions) & set(old)
    assert receiver.expect("b", BOB, 8).key.regions == fabric.regions
    receiver.arrived(receiver.transfers[0])
    assert (allocator.quarantined_pages, receiver.slots.held) == (0, 0)


def test_a_lost_prefillers_key_stays_while_a_healthy_transfer_uses_it(receiver, allocator, fabric):
    lost_pages = allocator.allocate(5)
    lost, healthy = receiver.expect("a", ALICE, 8), receiver.expect("b", BOB, 8)
    receiver.abandon(lost, lost_pages)
    receiver.revoke([lost])
    assert len(fabric.regions) == 4
    assert allocator.quarantined_pages == 5
    later = receiver.expect("c", BOB, 8)
    assert later.key is not healthy.key
    receiver.arrived(healthy)
    assert len(fabric.regions) == 2
    assert allocator.quarantined_pages == 0
    receiver.arrived(later)
    assert receiver.slots.held == 0


def test_two_prefillers_lost_one_after_the_other(receiver, allocator, fabric):
    first_pages, second_pages = allocator.allocate(3), allocator.allocate(4)
    first, second = receiver.expect("a", ALICE, 8), receiver.expect("b", BOB, 8)
    receiver.abandon(first, first_pages)
    receiver.revoke([first])
    receiver.abandon(second, second_pages)
    receiver.revoke([second])
    assert (allocator.quarantined_pages, receiver.slots.held, len(fabric.regions)) == (0, 0, 2)


def test_two_keys_that_one_loss_closes(receiver, allocator, fabric):
    first, shared = receiver.expect("a", ALICE, 8), receiver.expect("b", BOB, 8)
    receiver.abandon(first, allocator.allocate(2))
    receiver.revoke([first])  # its key stays: BOB, who is well, knows it too
    later = receiver.expect("c", BOB, 8)
    for transfer in (shared, later):
        receiver.abandon(transfer, allocator.allocate(2))
    receiver.revoke([shared, later])
    assert (allocator.free_pages, receiver.slots.held, len(fabric.regions)) == (16, 0, 2)


def test_pages_stay_in_quarantine_while_a_lost_prefiller_may_be_in_the_middle_of_a_copy(receiver, allocator, fabric):
    pages = allocator.allocate(5)
    lost = receiver.expect("a", ALICE, 8)
    receiver.abandon(lost, pages)
    first, second = lost.key.regions
    first.refuses = errno.EAGAIN
    receiver.revoke([lost])
    for _ in range(3):
        receiver.close_revoked()
        assert (allocator.quarantined_pages, receiver.slots.held) == (5, 1)
        assert first in fabric.regions
        assert second not in fabric.regions
    first.refuses = 0
    receiver.close_revoked()
    assert (allocator.quarantined_pages, receiver.slots.held, len(fabric.regions)) == (0, 0, 2)


def test_a_pool_that_cannot_be_registered_twice_waits_for_its_old_key_to_be_closed(receiver, allocator, fabric):
    lost, healthy = receiver.expect("a", ALICE, 8), receiver.expect("b", BOB, 8)
    receiver.abandon(lost, allocator.allocate(5))
    fabric.room = 2
    receiver.revoke([lost])
    assert not receiver.can_expect(), "a lost prefiller knows the only key"
    assert receiver.transfers == [lost, healthy]
    receiver.arrived(healthy)
    assert receiver.can_expect()
    assert (allocator.quarantined_pages, receiver.slots.held, len(fabric.regions)) == (0, 0, 2)
    assert receiver.expect("c", BOB, 8).key.regions == fabric.regions


def test_context_slots_that_cannot_be_registered_leave_no_registration(fabric, allocator):
    def refuse():
        text = "no memory may be locked any more"
        raise FabricError(text, errno.ENOMEM)

    with pytest.raises(FabricError):
        Receiver(fabric, fabric.register, allocator, SlotPool(4), refuse)
    assert fabric.regions == []


def test_a_key_that_cannot_be_closed_for_another_reason_is_an_error(receiver, allocator):
    lost = receiver.expect("a", ALICE, 8)
    receiver.abandon(lost, allocator.allocate(5))
    lost.key.regions[0].refuses = errno.EBUSY
    with pytest.raises(FabricError):
        receiver.revoke([lost])
