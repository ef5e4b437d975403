"""What a decoder's message, or its silence, means for an attempt."""

import msgspec
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef
from kvferry_proto.to_router import Finished, TokenRun

from kvferry_router.attempt import Attempt, Lost


def fits(run: TokenRun, attempt: Attempt, ids: list[int]) -> bool:
    """Whether a run can be what was asked for."""
    wanted = attempt.request.job.sampling.logprobs >= 0
    return (
        0 <= run.count <= attempt.request.answer.room
        and min(ids, default=0) >= 0
        and len(run.logprobs) == (run.count if wanted else 0)
    )


def checked(attempt: Attempt, message: Finished) -> Finished | Lost:
    """Compare the decoder's count with ours: a token lost on the way must not pass as a complete answer."""
    came = len(attempt.request.answer.token_ids)
    if message.usage.completion_tokens in (came, came - attempt.answered):
        return message
    lost = breach(attempt, f"it counts {message.usage.completion_tokens} tokens, {came} came", held=False)
    # Which one is missing is unknown: what was streamed can't be continued.
    return msgspec.structs.replace(lost, retry=not came)


def breach(attempt: Attempt, what: str, *, held: bool = True) -> Lost:
    """The decoder says what can't be: don't believe it further, ask another."""
    node = attempt.decoder.ref.id
    text = f"decoder {node} broke the protocol: {what}"
    error = RequestError(code=ErrorCode.INTERNAL, message=text, phase=attempt.request.phase, node=node)
    return Lost(error=error, retry=True, held=held)


def refusal(attempt: Attempt, message: Refused) -> Lost:
    """The decoder did nothing with a message."""
    codes = {"stale": ErrorCode.STALE_INCARNATION, **{code.value: code for code in ErrorCode}}
    code = codes.get(message.reason, ErrorCode.INTERNAL)
    node = attempt.decoder.ref.id
    text = f"decoder {node} refused: {message.reason}: {message.detail}"
    error = RequestError(code=code, message=text, phase=attempt.request.phase, node=node)
    # Where the refusal names no request this may be the wrong one: hence a Cancel, and another try in any case.
    return Lost(error=error, retry=error.retryable or not message.about, held=not message.about and code != "stale")


def not_accepted(attempt: Attempt, seconds: float) -> Lost:
    """The decoder did not answer Assign within `seconds`."""
    node = attempt.decoder.ref.id
    text = f"decoder {node} did not answer Assign within {seconds:g} s"
    error = RequestError(code=ErrorCode.TIMEOUT, message=text, phase=Phase.ASSIGN, node=node)
    return Lost(error=error, retry=True, held=True)


def gone(attempt: Attempt) -> Lost:
    """The decoder has left the cluster, and whatever it had is lost."""
    node = attempt.decoder.ref.id
    text = f"decoder {node} is gone"
    error = RequestError(code=ErrorCode.NODE_LOST, message=text, phase=attempt.request.phase, node=node)
    return Lost(error=error, retry=True)


def broke_off(attempt: Attempt) -> Lost:
    """The connection to the decoder broke, and is there again; what it said meanwhile is lost."""
    node = attempt.decoder.ref.id
    text = f"the connection to decoder {node} broke for a while"
    error = RequestError(code=ErrorCode.NODE_LOST, message=text, phase=attempt.request.phase, node=node)
    return Lost(error=error, retry=True, held=True, blame=False)


def stood_still(attempt: Attempt, seconds: float) -> Lost:
    """This router was taken for lost meanwhile, and the decoder dropped what it wanted."""
    text = f"the router stood still for {seconds:.1f} s, long enough for its lease to end"
    error = RequestError(code=ErrorCode.NODE_LOST, message=text, phase=attempt.request.phase)
    return Lost(error=error, retry=True, held=True, blame=False)


def named(error: RequestError, sender: NodeRef) -> RequestError:
    """Return an error that names its node."""
    return error if error.node else msgspec.structs.replace(error, node=sender.id)
