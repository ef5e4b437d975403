"""What a finished request has used."""

import enum

import msgspec


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV nobody had to compute for this request."""
    accepted_prediction_tokens: int = 0
    """Tokens of the answer that were guessed ahead, by the decoder that ended it."""
    rejected_prediction_tokens: int = 0
    """Guesses that were wrong, or came to nothing."""
