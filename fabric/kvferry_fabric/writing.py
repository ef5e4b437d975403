"""What an engine is told to write."""

import numpy as np
from kvferry_proto.memory import MemoryDescriptor

from kvferry_fabric.contract import PeerHandle, RegionHandle
from kvferry_fabric.descriptions import Remotes, schedule_fields
from kvferry_fabric.errors import FabricError, OutOfBoundsError
from kvferry_fabric.handles import MemoryRegion, Peer, own
from kvferry_fabric.listening import Listening
from kvferry_fabric.native import NativeEngine
from kvferry_fabric.schedule import ChunkSchedule, PagedWrite, timeout_ns
from kvferry_fabric.transfers import Transfer

_REFUSED = {22, 34}
"""EINVAL and ERANGE: the description of a transfer is at fault."""


def _too_large(wrong: OverflowError) -> OutOfBoundsError:
    return OutOfBoundsError(f"a transfer's numbers must not be negative and fit 64 bits: {wrong}", 34)


class Writing(Listening):
    """The calls that start a transfer, and give its handle."""

    def __init__(self, native: NativeEngine, provider: str, *, trace: bool) -> None:
        """`trace`: transfers keep the times of their layers."""
        super().__init__(native)
        self.provider = provider
        """Whose addresses and keys these are."""
        self._trace = trace
        self._remotes = Remotes(native, provider)
        self._error = native.new_error()  # the lock's; made once, as that takes a tenth of a call

    def schedule_layers(self, chunk: ChunkSchedule, *, deadline: float | None = None) -> Transfer:
        """Register a chunk: each layer's pages are written once its counter says so.

        `deadline`: seconds from now after which the transfer fails, with ETIMEDOUT, if it has not ended; as always,
        its event comes when nothing of it is in flight. An empty chunk is DONE at once. Raises OutOfBoundsError,
        before anything is posted, if a page leaves either region, and FabricError if the descriptor is not of this
        peer and provider; ValueError for a deadline that is not positive, or above a year.
        """
        self._remotes.check(chunk.remote, chunk.peer)
        runs = np.ascontiguousarray(chunk.runs, dtype=np.int32).reshape(-1, 3)
        native = self._native
        fields = {**schedule_fields(native, chunk, runs), "timeout_ns": timeout_ns(deadline)}
        try:
            plan = native.ffi.new("kf_schedule *", fields)
        except OverflowError as wrong:
            raise _too_large(wrong) from wrong
        with self._lock:  # the event may be polled before this thread goes on
            number = int(native.lib.kf_start(native.pointer, plan, self._error))
            return self._started(number, chunk.peer, chunk.layers, deadline)

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
        native, timeout = self._native, timeout_ns(deadline)
        source, target = own(native, region, MemoryRegion), own(native, peer, Peer)
        there = self._remotes.of(remote, peer)
        try:
            with self._lock:  # the event may be polled before this thread goes on
                number = int(
                    native.lib.kf_write_one(
                        native.pointer, source, source_offset, target,
                        there, destination_offset, length, slot, generation,
                        timeout, self._error,
                    )
                )  # fmt: skip
                return self._started(number, peer, 1, deadline)
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
        there = self._remotes.of(remote, peer)
        if self.provider == "shm":
            msg = "provider shm does not complete writes of no bytes"
            raise FabricError(msg, 95)
        native, timeout = self._native, timeout_ns(deadline)
        target = own(native, peer, Peer)
        try:
            with self._lock:  # the event may be polled before this thread goes on
                number = int(
                    native.lib.kf_write_immediate(
                        native.pointer, target, there, slot, generation, pages, timeout, self._error
                    )
                )
                return self._started(number, peer, 1, deadline)
        except OverflowError as wrong:
            raise _too_large(wrong) from wrong

    def _started(self, number: int, peer: PeerHandle, layers: int, deadline: float | None) -> Transfer:
        if not number:
            kind = OutOfBoundsError if -self._error.code in _REFUSED else FabricError
            raise kind(*self._native.describe(self._error))
        transfer = Transfer(self._native, number, peer.addresses[0], deadline, layers if self._trace else 0)
        self._transfers[number] = transfer
        return transfer
