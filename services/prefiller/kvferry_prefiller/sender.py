"""The messenger's sending half: registers what a forward pass is about to compute, so that it leaves layer by layer.

Before a pass, every chunk in it becomes one transfer per piece of the shard plan, each out of the pool of the rank that
holds it: runs of (source page, destination page, count), the same for every layer. The fabric's thread posts a layer's
writes when the model's counter says that the layer is done; no Python runs in between.
"""

import numpy as np
from kvferry_engine.worker import Worker
from kvferry_fabric import LayerCounter, PagedWrite, TransferHandle, runs
from kvferry_proto.nodes import NodeRef
from kvferry_proto.shards import Piece

from kvferry_prefiller.contexts import Contexts
from kvferry_prefiller.request import Request
from kvferry_prefiller.scheduler import Chunk, pages_to_send, pages_to_send_at_once


class Sender:
    """Owns the transfers under way and the connections to decoders' memory."""

    def __init__(self, worker: Worker, contexts: Contexts | None = None) -> None:
        """`contexts`: where the model drafts, and decoders may want hidden states."""
        self._worker = worker
        self.contexts = contexts
        self._regions = worker.register()
        self._by_transfer: dict[TransferHandle, Request] = {}
        self._places: dict[NodeRef, set[tuple[tuple[str, ...], str]]] = {}  # addresses and seats

    @property
    def active(self) -> int:
        """Transfers that have not ended."""
        return len(self._by_transfer)

    def connect(self, request: Request) -> None:
        """Reach the memory of every destination rank. Raises FabricError."""
        for memory in request.order.memory:
            request.peers.append(self._worker.fabric.connect(memory.addresses, memory.seat))
            self._places.setdefault(request.origin.sender, set()).add((memory.addresses, memory.seat))

    @property
    def known(self) -> set[NodeRef]:
        """Decoders whose memory was reached, and that have not been forgotten."""
        return set(self._places)

    def forget(self, decoder: NodeRef) -> None:
        """Keep no connection to a decoder that is gone: one that vanished without a word would stay open."""
        for addresses, seat in self._places.pop(decoder, ()):
            self._worker.fabric.forget(addresses, seat)

    def disconnect(self, request: Request) -> None:
        """Let go of the destination: once no transfer of the request is left."""
        while request.peers:
            request.peers.pop().close()
        if self.contexts is not None:
            self.contexts.release(request)

    def register(self, chunk: Chunk, first_value: int) -> None:
        """Register a chunk's transfers; layer l may leave when the counter is at first_value + l.

        Raises FabricError, and sends nothing more of this chunk, if one is refused (out of the destination's bounds).
        """
        if chunk.wants_context:
            assert self.contexts is not None
            self.contexts.hold(chunk.request)
        table = pages_to_send(chunk, self._worker.layout.page_size)
        self._register(chunk.request, table, self._worker.counter, first_value)

    def send_held(self, request: Request) -> None:
        """Register the pages that need not be computed: all of their layers may leave now. Raises as `register`."""
        self._register(request, pages_to_send_at_once(request), None, 0)

    def _register(self, request: Request, table: range, counter: LayerCounter | None, first_value: int) -> None:
        if not table:
            return
        first = request.order.first_page
        pages = np.asarray(request.pages, np.int32)[table.start : table.stop]
        destination = np.frombuffer(request.order.pages, np.int32)[table.start - first : table.stop - first]
        moves = runs(pages, destination)
        for piece in request.pieces:
            writes, fabric = self._writes(request, piece, moves), self._worker.fabric
            if counter is None:
                self._began(request, fabric.write_pages(writes))
            else:
                self._began(request, fabric.schedule_layers(writes.after(counter, first_value)))

    def send_context(self, request: Request) -> None:
        """Send the hidden state after the prompt's last token, which the last pass has put. Raises FabricError."""
        assert self.contexts is not None
        self._began(request, self.contexts.send(request))

    def _began(self, request: Request, transfer: TransferHandle) -> None:
        request.transfers.add(transfer)
        self._by_transfer[transfer] = request

    def _writes(self, request: Request, piece: Piece, moves: np.ndarray) -> PagedWrite:
        pool, order = self._worker.pool, request.order
        remote = order.memory[piece.destination_rank]
        page_bytes = order.layout.page_bytes
        return PagedWrite(
            layers=order.layout.layers,
            region=self._regions[piece.source_rank],
            peer=request.peers[piece.destination_rank],
            remote=remote,
            slot=order.slot,
            generation=order.generation,
            source_layer_stride=pool.layer_stride,
            # The destination's pool is all layers of its pages, whose number is its own affair.
            destination_layer_stride=remote.length // order.layout.layers,
            source_page_stride=pool.page_stride,
            destination_page_stride=page_bytes,
            source_offset=piece.source_offset,
            destination_offset=piece.destination_offset,
            length=piece.length,
            runs=moves,
        )

    def ended(self, transfer: TransferHandle | None) -> Request | None:
        """Strike a transfer off and return its request; None for one already struck, or for a slot's event."""
        if transfer is None or (request := self._by_transfer.pop(transfer, None)) is None:
            return None
        request.transfers.discard(transfer)
        return request

    def cancel(self, request: Request) -> None:
        """Post nothing more for a request; each of its transfers ends with an event once nothing of it is in flight."""
        for transfer in request.transfers:
            transfer.cancel()
