"""The open attempts of a router, and the messages between them and their decoders.

Everything here is synchronous and belongs to the event loop. An attempt is open until it ends; after that it is
closing while its decoder may still hold something of it, and then forgotten. What comes later is counted.
"""

import asyncio
from collections.abc import Callable

import msgspec
from kvferry_node.channels import Handler, Origin, Post
from kvferry_node.errors import ChannelError
from kvferry_node.logs import get_logger
from kvferry_proto.errors import ErrorCode, Phase, RequestError, fail
from kvferry_proto.message import Message, Refused, RequestFailed
from kvferry_proto.nodes import NodeRecord, NodeRef
from kvferry_proto.timeline import now
from kvferry_proto.to_decoder import Cancel
from kvferry_proto.to_router import Accepted, Cancelled, Finished, TokenRun, Tokens

from kvferry_router.attempt import Attempt, LastWord, Lost, StopFound
from kvferry_router.metrics import RouterMetrics

OpenPost = Callable[[Handler, Callable[[NodeRef], None]], Post]
CANCEL_RESEND_SECONDS = 0.2
LAST_WORD_SECONDS = 1.5
"""How long the end of an answer waits for what its decoder knows of it; the decoder waits for a second itself."""


class _Closing:
    """An attempt whose decoder has not confirmed its end."""

    def __init__(self, attempt: Attempt, deadline: float) -> None:
        self.attempt = attempt
        self.deadline = deadline
        self.timer: asyncio.TimerHandle | None = None
        self.word: asyncio.Future[LastWord | None] = asyncio.get_running_loop().create_future()
        """What the decoder said last; None if it says nothing any more."""


class Switchboard:
    """Sends Assign and Cancel, and hands to each attempt what its decoder says."""

    def __init__(
        self,
        open_post: OpenPost,
        metrics: RouterMetrics,
        *,
        stop_token_ids: list[int],
        accept_seconds: float,
        cancel_seconds: float,
    ) -> None:
        self.post = open_post(self.on_message, self.on_return)
        self._metrics = metrics
        self._stop_token_ids = stop_token_ids
        self._accept_seconds = accept_seconds
        self._cancel_seconds = cancel_seconds
        self._open: dict[str, Attempt] = {}
        self._closing: dict[str, _Closing] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self._log = get_logger()

    @property
    def open(self) -> int:
        """Attempts under way."""
        return len(self._open)

    @property
    def closing(self) -> int:
        """Attempts whose decoder has still to confirm that it let go."""
        return len(self._closing)

    def assign(self, attempt: Attempt) -> None:
        """Send the attempt to its decoder. Raises KvferryError if it can't be sent; then nothing is open."""
        node = attempt.decoder.ref.id
        try:
            self.post.to(attempt.decoder.peer).send(attempt.assign(self._stop_token_ids))
        except ChannelError as error:
            raise fail(ErrorCode.NODE_LOST, f"Assign was not sent: {error}", Phase.ASSIGN, node) from None
        self._open[attempt.id] = attempt
        self._timers[attempt.id] = self._loop.call_later(self._accept_seconds, self._not_accepted, attempt)

    def close(self, attempt: Attempt, *, held: bool) -> None:
        """The router is done with the attempt; `held`: its decoder may not be, so tell it and wait for its answer."""
        self._open.pop(attempt.id, None)
        self._stop_timer(attempt)
        if held:
            closing = _Closing(attempt, self._loop.time() + self._cancel_seconds)
            self._closing[attempt.id] = closing
            self._send_cancel(closing)

    async def last_word(self, attempt: Attempt) -> Cancelled | Finished | None:
        """Return what the decoder says of a closed attempt; None if that takes too long, or it is gone."""
        word = attempt.word
        if (closing := self._closing.get(attempt.id)) is not None:
            await asyncio.wait({closing.word}, timeout=LAST_WORD_SECONDS)
            word = closing.word.result() if closing.word.done() else None
        return word if isinstance(word, Cancelled | Finished) else None

    def on_message(self, origin: Origin, message: Message) -> None:
        """Take a message of a decoder."""
        match message:
            case Tokens():
                self._tokens(origin, message)
            case Refused():
                self._refused(origin, message)
            case Accepted() | Finished() | Cancelled() | RequestFailed():
                self._about_one(origin.sender, message)
            case _:
                self._late(message)

    def on_leave(self, record: NodeRecord) -> None:
        """A node is gone: whatever it had is lost, and nothing is held there any more."""
        for attempt in [each for each in self._open.values() if each.decoder.ref == record.ref]:
            text = f"decoder {record.ref.id} is gone"
            error = RequestError(
                code=ErrorCode.NODE_LOST, message=text, phase=attempt.request.phase, node=record.ref.id
            )
            attempt.finish(Lost(error=error, retry=True))
        for closing in [each for each in self._closing.values() if each.attempt.decoder.ref == record.ref]:
            self._forget(closing)
        self.post.forget(record.ref)

    def on_return(self, decoder: NodeRef) -> None:
        """The connection to a decoder broke, and is there again. What it said meanwhile is lost, and it drops what it
        can't tell of: ask again, and say so to be sure."""
        for attempt in [each for each in self._open.values() if each.decoder.ref == decoder]:
            text = f"the connection to decoder {decoder.id} broke for a while"
            error = RequestError(code=ErrorCode.NODE_LOST, message=text, phase=attempt.request.phase, node=decoder.id)
            attempt.finish(Lost(error=error, retry=True, held=True, blame=False))

    def stood_still(self, seconds: float) -> None:
        """Decoders have taken this router for lost and dropped what it wanted: ask again, and say so to be sure."""
        for attempt in list(self._open.values()):
            text = f"the router stood still for {seconds:.1f} s, long enough for its lease to end"
            error = RequestError(code=ErrorCode.NODE_LOST, message=text, phase=attempt.request.phase)
            attempt.finish(Lost(error=error, retry=True, held=True, blame=False))

    def abandon(self) -> None:
        """Forget what is still closing: the process ends."""
        for closing in list(self._closing.values()):
            self._forget(closing)

    # --- messages -------------------------------------------------------------------------------------------

    def _tokens(self, origin: Origin, message: Tokens) -> None:
        sender = origin.sender
        ids = message.token_ids.tolist()
        torn = sum(run.count for run in message.runs) != len(ids)
        start = 0
        for run in message.runs:
            end = start + run.count
            attempt = self._open.get(run.request_id)
            if attempt is None or attempt.decoder.ref != sender:
                self._late(message)
                self._cancel_stray(origin, run.request_id)
            elif torn or not _fits(run, attempt, ids[start:end]):
                attempt.finish(_breach(attempt, f"{run.count} tokens in a message of {len(ids)}"))
            else:
                self._feed(attempt, ids[start:end], run)
            start = end

    def _feed(self, attempt: Attempt, ids: list[int], run: TokenRun) -> None:
        if attempt.end.done() or not ids:
            return
        self._accepted(attempt)
        at = now()
        if attempt.last_token:
            self._metrics.inter_token.observe((at - attempt.last_token) / 1e9 / len(ids))
        attempt.last_token = at
        request = attempt.request
        request.feed(ids, run.logprobs)
        self._metrics.answer_tokens.inc(len(ids))
        if request.answer.stopped:
            attempt.finish(StopFound())

    def _about_one(self, sender: NodeRef, message: Accepted | Finished | Cancelled | RequestFailed) -> None:
        attempt = self._open.get(message.request_id)
        if attempt is None or attempt.decoder.ref != sender or attempt.end.done():
            self._closed_one(sender, message)
            return
        match message:
            case Accepted():
                self._accepted(attempt)
                if message.prefiller_spared:
                    attempt.on_spared()
            case Finished():
                attempt.finish(_checked(attempt, message))
            case RequestFailed():
                attempt.finish(Lost(error=_named(message.error, sender), retry=message.error.retryable))
            case Cancelled():
                attempt.finish(_breach(attempt, "it cancelled what nobody wanted cancelled", held=False))

    def _closed_one(self, sender: NodeRef, message: Accepted | Finished | Cancelled | RequestFailed) -> None:
        """A message about no open attempt: the end of a closing one, or too late."""
        attempt, closing = self._open.get(message.request_id), self._closing.get(message.request_id)
        if attempt is not None and attempt.decoder.ref == sender and not isinstance(message, Accepted):
            attempt.word = message
            return
        if closing is None or closing.attempt.decoder.ref != sender or isinstance(message, Accepted):
            self._late(message)
        else:
            self._forget(closing, message)

    def _refused(self, origin: Origin, message: Refused) -> None:
        """Nothing was done: with the request it names, or, where it names none, with one of those not yet accepted."""
        node = origin.peer.ref if origin.peer is not None else origin.sender
        self._log.warning("refused by a decoder", decoder=str(node), reason=message.reason, detail=message.detail)
        if message.about in self._closing:
            self._forget(self._closing[message.about])
            return
        for attempt in list(self._open.values()):
            if attempt.decoder.ref != node or attempt.end.done():
                continue
            if attempt.id == message.about or not (message.about or attempt.accepted):
                attempt.finish(_refusal(attempt, message))

    def _accepted(self, attempt: Attempt) -> None:
        if not attempt.accepted:
            attempt.accepted = True
            attempt.request.accepted()
            self._stop_timer(attempt)

    def _cancel_stray(self, origin: Origin, request_id: str) -> None:
        """A decoder works for an attempt that nobody here knows any more: its Cancel was lost."""
        if request_id in self._closing:
            return
        try:
            origin.reply(Cancel(request_id=request_id))
        except ChannelError as error:
            self._log.warning("a stray request was not cancelled", request_id=request_id, error=str(error))

    def _late(self, message: Message) -> None:
        self._metrics.late.labels(type(message).__name__).inc()

    # --- timers ---------------------------------------------------------------------------------------------

    def _not_accepted(self, attempt: Attempt) -> None:
        node = attempt.decoder.ref.id
        text = f"decoder {node} did not answer Assign within {self._accept_seconds:g} s"
        error = RequestError(code=ErrorCode.TIMEOUT, message=text, phase=Phase.ASSIGN, node=node)
        attempt.finish(Lost(error=error, retry=True, held=True))

    def _stop_timer(self, attempt: Attempt) -> None:
        timer = self._timers.pop(attempt.id, None)
        if timer is not None:
            timer.cancel()

    def _send_cancel(self, closing: _Closing) -> None:
        """Send Cancel, or try again while the queue is full; then wait until the deadline."""
        attempt = closing.attempt
        left = closing.deadline - self._loop.time()
        try:
            self.post.to(attempt.decoder.peer).send(Cancel(request_id=attempt.id))
        except ChannelError:
            if left > CANCEL_RESEND_SECONDS:
                closing.timer = self._loop.call_later(CANCEL_RESEND_SECONDS, self._send_cancel, closing)
                return
        closing.timer = self._loop.call_later(max(0.0, left), self._not_confirmed, closing)

    def _not_confirmed(self, closing: _Closing) -> None:
        self._metrics.cancel_timeouts.inc()
        attempt = closing.attempt
        self._log.warning("a cancel was not confirmed", request_id=attempt.id, decoder=str(attempt.decoder.ref))
        self._forget(closing)

    def _forget(self, closing: _Closing, word: LastWord | None = None) -> None:
        if closing.timer is not None:
            closing.timer.cancel()
        if not closing.word.done():
            closing.word.set_result(word)
        self._closing.pop(closing.attempt.id, None)


def _fits(run: TokenRun, attempt: Attempt, ids: list[int]) -> bool:
    """Whether a run can be what was asked for."""
    wanted = attempt.request.job.sampling.logprobs >= 0
    return (
        0 <= run.count <= attempt.request.answer.room
        and min(ids, default=0) >= 0
        and len(run.logprobs) == (run.count if wanted else 0)
    )


def _checked(attempt: Attempt, message: Finished) -> Finished | Lost:
    """Compare the decoder's count with ours: a token lost on the way must not pass as a complete answer."""
    came = len(attempt.request.answer.token_ids)
    if message.usage.completion_tokens in (came, came - attempt.answered):
        return message
    lost = _breach(attempt, f"it counts {message.usage.completion_tokens} tokens, {came} came", held=False)
    # Which one is missing is unknown: what was streamed can't be continued.
    return msgspec.structs.replace(lost, retry=not came)


def _breach(attempt: Attempt, what: str, *, held: bool = True) -> Lost:
    """The decoder says what can't be: don't believe it further, ask another."""
    node = attempt.decoder.ref.id
    text = f"decoder {node} broke the protocol: {what}"
    error = RequestError(code=ErrorCode.INTERNAL, message=text, phase=attempt.request.phase, node=node)
    return Lost(error=error, retry=True, held=held)


def _refusal(attempt: Attempt, message: Refused) -> Lost:
    codes = {"stale": ErrorCode.STALE_INCARNATION, **{code.value: code for code in ErrorCode}}
    code = codes.get(message.reason, ErrorCode.INTERNAL)
    node = attempt.decoder.ref.id
    text = f"decoder {node} refused: {message.reason}: {message.detail}"
    error = RequestError(code=code, message=text, phase=attempt.request.phase, node=node)
    # Where the refusal names no request this may be the wrong one: hence a Cancel, and another try in any case.
    return Lost(error=error, retry=error.retryable or not message.about, held=not message.about and code != "stale")


def _named(error: RequestError, sender: NodeRef) -> RequestError:
    return error if error.node else msgspec.structs.replace(error, node=sender.id)
