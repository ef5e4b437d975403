"""The open attempts of a router, and the messages between them and their decoders.

Everything here is synchronous and belongs to the event loop. An attempt is open until it ends; after that it is
closing (closing.py) while its decoder may still hold something of it, and then forgotten. What comes later is counted.
"""

import asyncio
from collections.abc import Callable

from kvferry_node.channels import Handler, Origin, Post
from kvferry_node.errors import ChannelError
from kvferry_node.logs import get_logger
from kvferry_proto.errors import ErrorCode, Phase, fail
from kvferry_proto.message import Message, Refused, RequestFailed
from kvferry_proto.nodes import NodeRecord, NodeRef
from kvferry_proto.timeline import now
from kvferry_proto.to_decoder import Cancel
from kvferry_proto.to_router import Accepted, Cancelled, Finished, Queued, TokenRun, Tokens

from kvferry_router import verdicts
from kvferry_router.attempt import Attempt, Lost, StopFound
from kvferry_router.closing import ClosingAttempts
from kvferry_router.metrics import RouterMetrics

AboutOne = Queued | Accepted | Finished | Cancelled | RequestFailed
OpenPost = Callable[[Handler, Callable[[NodeRef], None]], Post]


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
        self._open: dict[str, Attempt] = {}
        self._closing = ClosingAttempts(self.post, metrics, cancel_seconds)
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
            self._closing.add(attempt)

    async def last_word(self, attempt: Attempt) -> Cancelled | Finished | None:
        """Return what the decoder says of a closed attempt; None if that takes too long, or it is gone."""
        return await self._closing.last_word(attempt)

    def when_closed(self, request_id: str, then: Callable[[], None]) -> None:
        """Call `then` when a closed attempt's decoder has said its last word, or is asked for it no longer."""
        self._closing.when_closed(request_id, then)

    def on_message(self, origin: Origin, message: Message) -> None:
        """Take a message of a decoder."""
        match message:
            case Tokens():
                self._tokens(origin, message)
            case Refused():
                self._refused(origin, message)
            case Queued() | Accepted() | Finished() | Cancelled() | RequestFailed():
                self._about_one(origin.sender, message)
            case _:
                self._late(message)

    def on_leave(self, record: NodeRecord) -> None:
        """A node is gone: whatever it had is lost, and nothing is held there any more."""
        for attempt in [each for each in self._open.values() if each.decoder.ref == record.ref]:
            attempt.finish(verdicts.gone(attempt))
        self._closing.on_leave(record.ref)
        self.post.forget(record.ref)

    def on_return(self, decoder: NodeRef) -> None:
        """The connection to a decoder broke, and is there again. What it said meanwhile is lost, and it drops what it
        can't tell of: ask again, and say so to be sure."""
        for attempt in [each for each in self._open.values() if each.decoder.ref == decoder]:
            attempt.finish(verdicts.broke_off(attempt))
        self._closing.on_return(decoder)

    def stood_still(self, seconds: float) -> None:
        """Decoders have taken this router for lost and dropped what it wanted: ask again, and say so to be sure."""
        for attempt in list(self._open.values()):
            attempt.finish(verdicts.stood_still(attempt, seconds))

    def abandon(self) -> None:
        """Forget what is still closing: the process ends."""
        self._closing.abandon()

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
            elif torn or not verdicts.fits(run, attempt, ids[start:end]):
                attempt.finish(verdicts.breach(attempt, f"{run.count} tokens in a message of {len(ids)}"))
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

    def _about_one(self, sender: NodeRef, message: AboutOne) -> None:
        attempt = self._open.get(message.request_id)
        if attempt is None or attempt.decoder.ref != sender or attempt.end.done():
            self._closed_one(sender, message)
            return
        match message:
            case Queued():
                self._stop_timer(attempt)
            case Accepted():
                self._accepted(attempt)
                if message.prefiller_spared:
                    attempt.on_spared()
            case Finished():
                attempt.finish(verdicts.checked(attempt, message))
            case RequestFailed():
                attempt.request.heard(message)
                error = verdicts.named(message.error, sender)
                attempt.finish(Lost(error=error, retry=error.retryable, blame=error.avoid))
            case Cancelled():
                attempt.finish(verdicts.breach(attempt, "it cancelled what nobody wanted cancelled", held=False))

    def _closed_one(self, sender: NodeRef, message: AboutOne) -> None:
        """A message about no open attempt: the end of a closing one, or too late."""
        attempt = self._open.get(message.request_id)
        if isinstance(message, Queued | Accepted):
            self._late(message)
        elif attempt is not None and attempt.decoder.ref == sender:
            attempt.word = message
            attempt.request.heard(message)
        elif not self._closing.confirmed(sender, message):
            self._late(message)

    def _refused(self, origin: Origin, message: Refused) -> None:
        """Nothing was done: with the request it names, or, where it names none, with one of those not yet accepted."""
        node = origin.peer.ref if origin.peer is not None else origin.sender
        self._log.warning("refused by a decoder", decoder=str(node), reason=message.reason, detail=message.detail)
        if message.about in self._closing:
            self._closing.unknown(message.about)
            return
        for attempt in list(self._open.values()):
            if attempt.decoder.ref != node or attempt.end.done():
                continue
            if attempt.id == message.about or not (message.about or attempt.accepted):
                attempt.finish(verdicts.refusal(attempt, message))

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
        attempt.finish(verdicts.not_accepted(attempt, self._accept_seconds))

    def _stop_timer(self, attempt: Attempt) -> None:
        timer = self._timers.pop(attempt.id, None)
        if timer is not None:
            timer.cancel()
