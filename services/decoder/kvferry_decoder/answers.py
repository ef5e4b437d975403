"""What a decoder tells routers: one message per router and step for all requests that ran in it, some for very many."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from kvferry_node.channels import Origin
from kvferry_node.errors import ChannelError
from kvferry_node.logs import get_logger
from kvferry_proto.errors import RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Message, RequestFailed
from kvferry_proto.nodes import NodeRef
from kvferry_proto.timeline import now
from kvferry_proto.to_decoder import PrefillReport
from kvferry_proto.to_router import Accepted, Cancelled, Finished, Queued, TokenLogprobs, TokenRun, Tokens
from kvferry_proto.usage import FinishReason, Usage

from kvferry_decoder.request import Request

REPORT_NS = 1_000_000_000
"""How long the last word waits: a prefiller reports when its last write is complete, so when the pages are here."""

RUNS_IN_A_MESSAGE = 256
"""With twenty log probabilities a token, and drafts, they fill a third of what a message's header may hold."""


class DrawnRun(NamedTuple):
    """The tokens drawn for a request in this step, and why the request ends with the last, if it does."""

    request: Request
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """One for each token, or none."""
    finish: FinishReason | None


class Unreported(NamedTuple):
    """The last word about an answer whose prefiller has not reported."""

    request: Request
    word: Callable[[Request], Message]
    until: int
    """Monotonic ns."""


class Answers:
    """Sends to routers. A router that can't be reached is remembered: `unreachable` names it once.

    The last word about an answer waits for its prefiller's report: what was cached, and the time line, stand in it.
    """

    def __init__(self) -> None:
        self._lost: list[bytes] = []
        self._unreported: dict[str, Unreported] = {}

    def __len__(self) -> int:
        return len(self._unreported)

    def queued(self, request: Request) -> None:
        """Tell that a request is here and has to wait; once, and not if it was accepted before it was preempted."""
        if not (request.queued or request.accepted):
            request.queued = True
            self._send(request.origin, Queued(request_id=request.id))

    def accepted(self, request: Request) -> None:
        """Tell that pages are reserved; once, though a preempted request is admitted again."""
        if not request.accepted:
            request.accepted = True
            self._send(request.origin, Accepted(request_id=request.id, prefiller_spared=request.spared))

    def failed(self, request: Request, error: RequestError) -> None:
        """Tell that a request is over, and why."""
        request.timeline.finished = now()
        word = RequestFailed(
            request_id=request.id, error=error, decoder=request.timeline, prefiller=request.prefill_timeline
        )
        self._send(request.origin, word)

    def cancelled(self, request: Request, *, arrived: bool) -> None:
        """Confirm a cancel. `arrived`: the prompt's KV was here, so that its prefiller reports."""
        self._last_word(request, _cancelled, waits=arrived)

    def finished(self, request: Request, reason: FinishReason) -> None:
        """Tell that the answer is complete."""
        self._last_word(request, functools.partial(_finished, reason=reason), waits=True)

    def _last_word(self, request: Request, word: Callable[[Request], Message], *, waits: bool) -> None:
        request.timeline.finished = now()
        if waits and request.asked and request.prefill_timeline is None:
            self._unreported[request.id] = Unreported(request, word, now() + REPORT_NS)
        else:
            self._send(request.origin, word(request))

    def reported(self, report: PrefillReport) -> None:
        """Say what waited for this report."""
        if (entry := self._unreported.get(report.request_id)) is not None:
            entry.request.note(report.timeline)
            self._say(entry)

    def without_report(self, request_id: str) -> None:
        """Say what waited: the prefiller has ended its part without a report."""
        if (entry := self._unreported.get(request_id)) is not None:
            self._say(entry)

    def sweep(self, alive: Callable[[NodeRef], bool]) -> None:
        """Say what has waited long enough, or waits for a prefiller that is gone: without the report."""
        for entry in list(self._unreported.values()):
            peer = entry.request.prefiller
            if entry.until < now() or peer is None or not alive(peer.ref):
                self._say(entry)

    def _say(self, entry: "Unreported") -> None:
        del self._unreported[entry.request.id]
        self._send(entry.request.origin, entry.word(entry.request))

    def step(self, drawn: list[DrawnRun]) -> None:
        """Tell what a step drew; the requests that ended with it are told so after their last token."""
        by_router: dict[bytes, list[DrawnRun]] = defaultdict(list)
        for entry in drawn:
            by_router[entry.request.origin.key].append(entry)
        for entries in by_router.values():
            origin = entries[0].request.origin
            for first in range(0, len(entries), RUNS_IN_A_MESSAGE):
                self._send(origin, _tokens(entries[first : first + RUNS_IN_A_MESSAGE]))
            for entry in entries:
                if entry.finish is not None:
                    self.finished(entry.request, entry.finish)

    def unreachable(self) -> list[bytes]:
        """Return, and forget, the connections to routers that something could not be sent to."""
        lost, self._lost = self._lost, []
        return lost

    def _send(self, origin: Origin, message: Message) -> None:
        try:
            origin.reply(message)
        except ChannelError as error:
            get_logger().warning("router unreachable", router=str(origin.sender), error=str(error))
            self._lost.append(origin.key)


def _tokens(entries: list[DrawnRun]) -> Tokens:
    return Tokens(
        runs=[TokenRun(entry.request.id, len(entry.tokens), entry.logprobs) for entry in entries],
        token_ids=Int32s(token for entry in entries for token in entry.tokens),
    )


def _cancelled(request: Request) -> Cancelled:
    return Cancelled(
        request_id=request.id,
        cached_tokens=request.cached,
        decoder=request.timeline,
        prefiller=request.prefill_timeline,
    )


def _finished(request: Request, reason: FinishReason) -> Finished:
    prompt = request.prompt_length - request.answered
    return Finished(
        request_id=request.id,
        finish_reason=reason,
        usage=Usage(
            prompt_tokens=prompt,
            completion_tokens=request.answered + request.generated,
            cached_tokens=min(request.cached, prompt),
            accepted_prediction_tokens=request.timeline.accepted,
            rejected_prediction_tokens=request.timeline.drafted - request.timeline.accepted,
        ),
        decoder=request.timeline,
        prefiller=request.prefill_timeline,
    )
