"""One open request: the pieces of its answer so far, and how it ended."""

import enum
from collections import deque
from collections.abc import Callable

from kvferry_proto import to_client

from kvferry.answer import Completion, Delta
from kvferry.errors import KvferryClientError, from_request_error


class RequestState(enum.Enum):
    """Where a request stands."""

    SENT = "sent"
    ANSWERING = "answering"
    """The router has sent the first piece."""
    COMPLETE = "complete"
    FAILED = "failed"


OVER = frozenset({RequestState.COMPLETE, RequestState.FAILED})
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.SENT: frozenset({RequestState.ANSWERING}) | OVER,
    RequestState.ANSWERING: frozenset({RequestState.ANSWERING}) | OVER,
    RequestState.COMPLETE: frozenset(),
    RequestState.FAILED: frozenset(),
}


class Request:
    """Collects an answer. Whoever reads it takes `pieces` off in order; the whole is kept for the end."""

    def __init__(self, request_id: str, on_news: Callable[[], None] | None = None) -> None:
        self.id = request_id
        self.state = RequestState.SENT
        self.pieces: deque[Delta] = deque()
        self.completion: Completion | None = None
        self.error: KvferryClientError | None = None
        self._on_news = on_news
        self._all: list[Delta] = []

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.state in OVER

    @property
    def readable(self) -> bool:
        """Whether `next_piece` has something to say."""
        return self.over or bool(self.pieces)

    def next_piece(self) -> Delta | None:
        """Return the next piece, or None after the last of a complete answer. Raises the error that ended it."""
        if self.pieces:
            return self.pieces.popleft()
        if self.error is not None:
            raise self.error
        return None

    def whole(self) -> Completion:
        """Return the whole answer. Raises RuntimeError before it is complete."""
        if self.completion is None:
            msg = "the answer is not complete yet: read the stream to its end first"
            raise RuntimeError(msg)
        return self.completion

    def take(self, message: to_client.Delta | to_client.Completed | to_client.Failed) -> None:
        """Take in what the router sent."""
        match message:
            case to_client.Delta():
                self._add(message)
            case to_client.Completed():
                self._complete(message)
            case to_client.Failed():
                self.fail(from_request_error(message.error))

    def fail(self, error: KvferryClientError) -> None:
        """End without (more of) an answer."""
        self._enter(RequestState.FAILED)
        self.error = error
        self._tell()

    def _add(self, message: to_client.Delta) -> None:
        self._enter(RequestState.ANSWERING)
        piece = Delta(text=message.text, token_ids=list(message.token_ids), logprobs=message.logprobs)
        self.pieces.append(piece)
        self._all.append(piece)
        self._tell()

    def _complete(self, message: to_client.Completed) -> None:
        self._enter(RequestState.COMPLETE)
        self.completion = Completion(
            id=self.id,
            model=message.model,
            text="".join(piece.text for piece in self._all),
            token_ids=[token for piece in self._all for token in piece.token_ids],
            logprobs=[entry for piece in self._all for entry in piece.logprobs],
            finish_reason=message.finish_reason,
            usage=message.usage,
            timeline=message.timeline,
        )
        self._tell()

    def _enter(self, state: RequestState) -> None:
        if state not in TRANSITIONS[self.state]:
            msg = f"request {self.id} cannot become {state.value}: it is {self.state.value}"
            raise RuntimeError(msg)
        self.state = state

    def _tell(self) -> None:
        if self._on_news is not None:
            self._on_news()
