"""What a prefiller tells decoders: one last word about each request, when nothing of it is in flight."""

from kvferry_node.channels import Origin
from kvferry_node.errors import ChannelError
from kvferry_node.logs import get_logger
from kvferry_proto.codec import WireError
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Message
from kvferry_proto.to_decoder import CancelConfirmed, PrefillFailed, PrefillReport
from kvferry_proto.to_prefiller import CancelPrefill, Prefill

from kvferry_prefiller.request import Request


def failed(origin: Origin, order: Prefill, error: RequestError) -> None:
    """Tell that the prompt is not prefilled, and why."""
    message = PrefillFailed(request_id=order.request_id, slot=order.slot, generation=order.generation, error=error)
    _tell(origin, message)


def confirmed(origin: Origin, asked: Prefill | CancelPrefill) -> None:
    """Tell that nothing of the request is in flight, and nothing will be."""
    _tell(origin, CancelConfirmed(request_id=asked.request_id, slot=asked.slot, generation=asked.generation))


def reported(request: Request, checksums: Int32s, context_checksum: int | None, *, node: str) -> None:
    """Tell that every write is complete; that it can't be told, where the checksums are more than a message holds."""
    order = request.order
    report = PrefillReport(
        request_id=order.request_id,
        slot=order.slot,
        generation=order.generation,
        timeline=request.timeline,
        checksums=checksums,
        context_checksum=context_checksum,
    )
    try:
        _tell(request.origin, report)
    except WireError as why:
        text = f"the report on a prompt of {len(order.tokens)} tokens can't be sent: {why}"
        error = RequestError(code=ErrorCode.INTERNAL, message=text, phase=Phase.TRANSFER, node=node)
        failed(request.origin, order, error)


def stopped(request: Request) -> None:
    """Tell that a request is over that was not prefilled to its end."""
    if request.failure is not None:
        failed(request.origin, request.order, request.failure)
    else:
        confirmed(request.origin, request.order)


def _tell(origin: Origin, message: Message) -> None:
    try:
        origin.reply(message)
    except ChannelError as error:
        # The decoder asks again, or is gone and its lease will say so.
        get_logger().warning("decoder unreachable", decoder=str(origin.sender), error=str(error))
