"""An answer while it grows: ids, text, log probabilities, and the part that its reader has not taken yet."""

from collections.abc import Collection, Sequence

from kvferry_proto.to_router import TokenLogprobs
from kvferry_proto.usage import FinishReason

from kvferry_router.detokenizer import Detokenizer, StopStrings
from kvferry_router.job import Job, TokenEvent
from kvferry_router.tokenizer import Tokenizer


class GrowingAnswer:
    """Collects tokens; a slow reader gets several steps at once, so nothing queues per token."""

    def __init__(self, job: Job, tokenizer: Tokenizer, stop_token_ids: Collection[int]) -> None:
        self._limit = job.sampling.max_tokens
        self._ends = frozenset() if job.sampling.ignore_eos else frozenset(stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, job.tokens[-64:], job.spoken)
        self._stops = StopStrings(job.stop) if job.stop else None
        self.token_ids: list[int] = []
        self._taken = 0
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._limit - len(self.token_ids)

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._stops is not None and self._stops.hit

    @property
    def complete(self) -> FinishReason | None:
        """Why no further token can come, or None. The decoder says so too; this counts if it dies before it does."""
        if self.stopped or (self.token_ids and self.token_ids[-1] in self._ends):
            return FinishReason.STOP
        return None if self.room else FinishReason.LENGTH

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Take what a decode step gave; tokens after a stop string are dropped."""
        if self._stops is None:
            self._take(ids, logprobs)
            return
        for index, token in enumerate(ids):
            if self._stops.hit:
                return
            self._take([token], logprobs[index : index + 1])

    def _take(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self.token_ids.extend(ids)
        self._logprobs.extend(logprobs)
        # An end token may have text of its own, which is not part of the answer.
        spoken = ids[:-1] if ids[-1] in self._ends else ids
        self._write(self._detokenizer.push(spoken))

    def end(self) -> None:
        """No token will come: release the text that was held back."""
        if not self.stopped:
            self._write(self._detokenizer.finish())
        if self._stops is not None:
            self._text.append(self._stops.finish())

    def _write(self, text: str) -> None:
        if self._stops is not None:
            text = self._stops.push(text)
        if text:
            self._text.append(text)

    def take(self) -> TokenEvent | None:
        """Return what came since the last call, or None."""
        ids = self.token_ids[self._taken :]
        text = "".join(self._text)
        if not ids and not text:
            return None
        event = TokenEvent(token_ids=ids, text=text, logprobs=self._logprobs)
        self._taken = len(self.token_ids)
        self._text, self._logprobs = [], []
        return event
