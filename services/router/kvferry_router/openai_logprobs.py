"""Log probabilities in OpenAI's two styles."""

from collections.abc import Sequence
from typing import Any

from kvferry_proto.to_router import TokenLogprobs

from kvferry_router.tokenizer import Tokenizer


class CompletionLogprobs:
    """Parallel lists; offsets count characters from the start of the answer, over all its chunks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def format(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the next tokens' part."""
        tokens = [self._tokenizer.token_text(entry.token) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float] | None:
        if not entry.top:
            return None
        drawn = {self._tokenizer.token_text(entry.token): entry.logprob}
        return {self._tokenizer.token_text(token): logprob for token, logprob in entry.top} | drawn


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return a list of objects, one per token, each with its likeliest alternatives."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}
