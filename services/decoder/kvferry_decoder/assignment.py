"""What a decoder checks before it takes a request: everything that would otherwise go wrong later, and less clearly."""

from kvferry_engine.worker import Worker
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.page_table import Source, unpack
from kvferry_proto.to_decoder import Assign

from kvferry_decoder.scheduler import Scheduler

# A refused router may try again after about the time that a short answer takes to end.
_RETRY_AFTER_SECONDS = 1.0


def why_not(assign: Assign, worker: Worker, scheduler: Scheduler, node: str) -> RequestError | None:
    """Return why the assignment can't be taken, or None."""
    for code, text in (
        (ErrorCode.BAD_REQUEST, _tokens(assign, worker) or _page_table(assign, worker)),
        (ErrorCode.PROMPT_TOO_LONG, _size(assign, worker)),
        (ErrorCode.OVERLOADED, None if scheduler.can_add() else "this decoder's queue is full"),
    ):
        if text is not None:
            retry_after = _RETRY_AFTER_SECONDS if code is ErrorCode.OVERLOADED else None
            return RequestError(code=code, message=text, phase=Phase.ASSIGN, node=node, retry_after=retry_after)
    return None


def _tokens(assign: Assign, worker: Worker) -> str | None:
    tokens, vocabulary = assign.tokens, worker.config.vocab_size
    if not tokens:
        return "a prompt needs at least one token"
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        return f"token ids must lie in 0..{vocabulary - 1}"
    if not 0 <= assign.answered < len(tokens):
        return f"{assign.answered} of {len(tokens)} tokens cannot be answered already"
    return None


def _page_table(assign: Assign, worker: Worker) -> str | None:
    try:
        entries = unpack(assign.page_table)
    except ValueError as error:
        return str(error)
    needed = worker.layout.pages_for(len(assign.tokens) - 1)
    if len(entries) != needed:
        return f"{len(assign.tokens) - 1} tokens take {needed} pages, the page table has {len(entries)}"
    source = Source.LOCAL if assign.prefiller is None else Source.PREFILLER
    if any(entry.source is not source for entry in entries):
        return f"with{'out' if source is Source.LOCAL else ''} a prefiller every page comes from {source.name}"
    return None


def _size(assign: Assign, worker: Worker) -> str | None:
    if len(assign.tokens) >= worker.max_context:
        return f"{len(assign.tokens)} tokens leave no room for an answer within {worker.max_context}"
    return None
