"""Requests that ended without an answer: the log says where their time went, since no answer is there to carry it."""

from kvferry_node.logs import get_logger
from kvferry_proto.errors import ErrorCode
from kvferry_proto.timeline import DecodeTimeline, Timeline, summary_ms

from kvferry_router.request import Request


def to_be_told(request: Request) -> bool:
    """Whether the log has a word for it: a node had it, or its client left. Other errors say it all."""
    error = request.error
    return error is not None and (bool(request.id) or error.code is ErrorCode.CANCELLED)


def tell(request: Request) -> None:
    """Log an early end; a decoder that was told of it has said what it knows."""
    error, word = request.error, request.word
    assert error is not None
    decoder, prefiller = (word.decoder, word.prefiller) if word is not None else (DecodeTimeline(), None)
    timeline = Timeline(router=request.timeline, decoder=decoder, prefiller=prefiller)
    get_logger().info(
        "a request ended early",
        request_id=request.id,
        client_id=request.name,
        code=error.code,
        phase=error.phase,
        why=error.message,
        nodes=request.nodes,
        attempts=request.timeline.attempts if request.id else 0,
        prompt_tokens=len(request.job.tokens),
        answer_tokens=len(request.answer.token_ids),
        phases_ms=summary_ms(timeline),
    )
