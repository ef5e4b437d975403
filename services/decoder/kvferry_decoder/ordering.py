"""What a prefiller is asked for: the pages that a receiving request lacks, and where each arrives."""

from kvferry_engine.worker import Worker
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import Peer
from kvferry_proto.shards import Piece, plan
from kvferry_proto.to_prefiller import Prefill

from kvferry_decoder.receiver import Transfer
from kvferry_decoder.request import Request


def pieces_of(peer: Peer, layout: KVLayout, name: str, turn: int = 0) -> list[Piece]:
    """Return what arrives for each page of each layer: the same number whatever the `turn`, which deals replicas out.

    Raises ValueError if the prefiller's pages do not fit into those of this decoder, `name`.
    """
    if peer.layout is None:
        msg = f"prefiller {peer.ref} does not say how its KV cache is laid out"
        raise ValueError(msg)
    names = f"prefiller {peer.ref.id}", f"decoder {name}"
    return plan(peer.layout, layout, turn=turn, names=names)


def lacking(request: Request, layout: KVLayout) -> list[int]:
    """Return the pages to be filled: all but those held, up to that of the last token but one."""
    return request.pages[request.held : layout.pages_for(len(request.tokens) - 1)]


def order(request: Request, transfer: Transfer, worker: Worker) -> Prefill:
    """Write the order for a request whose transfer is armed."""
    return Prefill(
        request_id=request.id,
        tokens=Int32s(request.tokens[:-1]),
        pages=Int32s(lacking(request, worker.layout)),
        slot=transfer.slot.number,
        generation=transfer.slot.generation,
        layout=worker.layout,
        memory=[region.descriptor for region in transfer.key.regions],
        checksums=worker.settings.verify_kv,
        first_page=request.held,
        cache_salt=request.cache_salt,
        context=transfer.key.context.descriptor if transfer.key.context is not None else None,
    )
