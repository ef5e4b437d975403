"""What a prefiller checks before it takes a request: everything that would otherwise go wrong when bytes move."""

from kvferry_engine.worker import Worker
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.nodes import NodeRef
from kvferry_proto.to_prefiller import Prefill

from kvferry_prefiller.scheduler import Scheduler


def why_not(
    order: Prefill, worker: Worker, scheduler: Scheduler, *, ref: NodeRef, decoder: NodeRef
) -> RequestError | None:
    """Return why this prefiller, `ref`, can't take the request, or None."""
    for code, text in (
        (ErrorCode.LAYOUT_MISMATCH, _layouts(order, worker, decoder, ref)),
        (ErrorCode.BAD_REQUEST, _shape(order, worker)),
        (ErrorCode.PROMPT_TOO_LONG, _size(order, worker, scheduler)),
        (ErrorCode.OVERLOADED, None if scheduler.can_add() else "this prefiller's queue is full"),
    ):
        if text is not None:
            return RequestError(code=code, message=text, phase=Phase.PREFILL, node=ref.id)
    return None


def _layouts(order: Prefill, worker: Worker, decoder: NodeRef, ref: NodeRef) -> str | None:
    why = worker.layout.mismatch(order.layout, names=(f"prefiller {ref.id}", f"decoder {decoder.id}"))
    if why is not None:
        return f"KV pages cannot travel between these nodes: {why}"
    providers = {memory.provider for memory in order.memory} | {worker.fabric.provider}
    if len(providers) > 1:
        return f"one fabric provider is needed on both sides, found {sorted(providers)}"
    return None


def _shape(order: Prefill, worker: Worker) -> str | None:
    tokens, pages, memory = order.tokens, order.pages, order.memory
    if not tokens:
        return "a prefill needs at least one token"
    if not 0 <= min(tokens) <= max(tokens) < worker.config.vocab_size:
        return f"token ids must lie in 0..{worker.config.vocab_size - 1}"
    lacking = worker.layout.pages_for(len(tokens)) - order.first_page
    if lacking < 1:
        return f"a decoder that holds {order.first_page} pages of {len(tokens)} tokens lacks none"
    if len(pages) != lacking:
        return f"{len(tokens)} tokens take {lacking} pages from page {order.first_page} on, {len(pages)} came"
    if len(memory) != order.layout.ranks:
        return f"a decoder of {order.layout.ranks} ranks has as many memory regions, {len(memory)} came"
    # Layers are told apart by their distance, which is the region's length over their number.
    if any(region.length % (order.layout.layers * order.layout.page_bytes) for region in memory):
        return f"a KV pool is {order.layout.layers} layers of whole pages of {order.layout.page_bytes} bytes"
    held = min(region.length // (order.layout.layers * order.layout.page_bytes) for region in memory)
    if min(pages) < 0 or max(pages) >= held:
        return f"destination pages must lie in 0..{held - 1}"
    if order.context is not None and not worker.model.drafts:
        return "this model drafts nothing: there is no hidden state to send"
    if len(set(pages)) != len(pages):
        return "the page table names a page twice"
    return None


def _size(order: Prefill, worker: Worker, scheduler: Scheduler) -> str | None:
    longest = worker.config.max_positions
    if len(order.tokens) > longest:
        return f"{len(order.tokens)} tokens are more than the model's {longest}"
    if not scheduler.can_hold(len(order.tokens)):
        return f"{len(order.tokens)} tokens do not fit into a pool of {worker.allocator.pages} pages"
    return None
