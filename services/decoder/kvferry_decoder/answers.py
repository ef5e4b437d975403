"""What a decoder tells routers: one message per router and step for all requests that ran in it, some for very many."""

from collections import defaultdict
from typing import NamedTuple

from kvferry_node.channels import Origin
from kvferry_node.errors import ChannelError
from kvferry_node.logs import get_logger
from kvferry_proto.errors import RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Message, RequestFailed
from kvferry_proto.timeline import now
from kvferry_proto.to_router import Accepted, Cancelled, Finished, TokenLogprobs, TokenRun, Tokens
from kvferry_proto.usage import FinishReason, Usage

from kvferry_decoder.request import Request

RUNS_IN_A_MESSAGE = 256
"""With twenty log probabilities a token, and drafts, they fill a third of what a message's header may hold."""


class DrawnRun(NamedTuple):
    """The tokens drawn for a request in this step, and why the request ends with the last, if it does."""

    request: Request
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """One for each token, or none."""
    finish: FinishReason | None


class Answers:
    """Sends to routers. A router that can't be reached is remembered: `unreachable` names it once."""

    def __init__(self) -> None:
        self._lost: list[bytes] = []

    def accepted(self, request: Request) -> None:
        """Tell that pages are reserved; once, though a preempted request is admitted again."""
        if not request.accepted:
            request.accepted = True
            self._send(request.origin, Accepted(request_id=request.id, prefiller_spared=request.spared))

    def failed(self, request: Request, error: RequestError) -> None:
        """Tell that a request is over, and why."""
        self._send(request.origin, RequestFailed(request_id=request.id, error=error))

    def cancelled(self, request: Request) -> None:
        """Confirm a cancel."""
        self._send(request.origin, Cancelled(request_id=request.id))

    def finished(self, request: Request, reason: FinishReason) -> None:
        """Tell that the answer is complete."""
        self._send(request.origin, _finished(request, reason))

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


def _finished(request: Request, reason: FinishReason) -> Finished:
    request.timeline.finished = now()
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
