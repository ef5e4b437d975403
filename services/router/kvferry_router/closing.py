"""Attempts that are over for this router, and whose decoder has still to say that they are over for it."""

import asyncio
from collections.abc import Callable

from kvferry_node.channels import Post
from kvferry_node.errors import ChannelError
from kvferry_node.logs import get_logger
from kvferry_proto.nodes import NodeRef
from kvferry_proto.to_decoder import Cancel
from kvferry_proto.to_router import Cancelled, Finished

from kvferry_router.attempt import Attempt
from kvferry_router.metrics import RouterMetrics
from kvferry_router.request import LastWord

CANCEL_RESEND_SECONDS = 0.2
LAST_WORD_SECONDS = 1.5
"""How long the end of an answer waits for what its decoder knows of it; the decoder waits for a second itself."""


class _Closing:
    """One attempt."""

    def __init__(self, attempt: Attempt, deadline: float) -> None:
        self.attempt = attempt
        self.deadline = deadline
        self.timer: asyncio.TimerHandle | None = None
        self.word: asyncio.Future[LastWord | None] = asyncio.get_running_loop().create_future()
        """What the decoder said last; None if it says nothing any more."""


class ClosingAttempts:
    """Tells decoders to cancel, and waits for their last word. Belongs to the event loop."""

    def __init__(self, post: Post, metrics: RouterMetrics, cancel_seconds: float) -> None:
        self._post = post
        self._metrics = metrics
        self._cancel_seconds = cancel_seconds
        self._closing: dict[str, _Closing] = {}
        self._loop = asyncio.get_running_loop()
        self._log = get_logger()

    def __len__(self) -> int:
        return len(self._closing)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._closing

    def add(self, attempt: Attempt) -> None:
        """Tell the attempt's decoder that it is over."""
        closing = _Closing(attempt, self._loop.time() + self._cancel_seconds)
        self._closing[attempt.id] = closing
        self._send_cancel(closing)

    async def last_word(self, attempt: Attempt) -> Cancelled | Finished | None:
        """Return what the decoder says of it; None if that takes too long, or it is gone."""
        word = attempt.word
        if (closing := self._closing.get(attempt.id)) is not None:
            await asyncio.wait({closing.word}, timeout=LAST_WORD_SECONDS)
            word = closing.word.result() if closing.word.done() else None
        return word if isinstance(word, Cancelled | Finished) else None

    def when_closed(self, request_id: str, then: Callable[[], None]) -> None:
        """Call `then` once a decoder's last word has come, or is waited for no longer: at once if it is not."""
        if (closing := self._closing.get(request_id)) is not None:
            closing.word.add_done_callback(lambda _: then())
        else:
            then()

    def confirmed(self, sender: NodeRef, word: LastWord) -> bool:
        """Take a decoder's last word; returns whether it is about one of these attempts."""
        closing = self._closing.get(word.request_id)
        if closing is None or closing.attempt.decoder.ref != sender:
            return False
        closing.attempt.request.heard(word)
        self._forget(closing, word)
        return True

    def unknown(self, request_id: str) -> None:
        """The decoder knows nothing of it."""
        self._forget(self._closing[request_id])

    def on_leave(self, ref: NodeRef) -> None:
        """A node is gone, and holds nothing any more."""
        for closing in [each for each in self._closing.values() if each.attempt.decoder.ref == ref]:
            self._forget(closing)

    def on_return(self, ref: NodeRef) -> None:
        """The connection to a decoder broke, and is there again: a Cancel may have been lost with it."""
        for closing in [each for each in self._closing.values() if each.attempt.decoder.ref == ref]:
            self._stop_timer(closing)
            self._send_cancel(closing)

    def abandon(self) -> None:
        """Forget all: the process ends."""
        for closing in list(self._closing.values()):
            self._forget(closing)

    def _send_cancel(self, closing: _Closing) -> None:
        """Send Cancel, or try again while the queue is full; then wait until the deadline."""
        attempt = closing.attempt
        left = closing.deadline - self._loop.time()
        try:
            self._post.to(attempt.decoder.peer).send(Cancel(request_id=attempt.id))
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

    def _stop_timer(self, closing: _Closing) -> None:
        if closing.timer is not None:
            closing.timer.cancel()

    def _forget(self, closing: _Closing, word: LastWord | None = None) -> None:
        self._stop_timer(closing)
        if not closing.word.done():
            closing.word.set_result(word)
        self._closing.pop(closing.attempt.id, None)
