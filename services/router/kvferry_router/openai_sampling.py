"""From the fields of a request to how its tokens are drawn."""

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import TypeVar

from kvferry_proto.sampling import SamplingParams

from kvferry_router.bad_request import BadRequest
from kvferry_router.openai_types import Common

T = TypeVar("T")

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def sampling_of(request: Common, *, max_tokens: int, logprobs: int, vocabulary: int) -> SamplingParams:
    """Return the settings, with OpenAI's defaults for what was left out. Raises BadRequest."""
    return SamplingParams(
        temperature=_given(request.temperature, 1.0),
        top_p=_given(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        logit_bias=_biases(request.logit_bias or {}, vocabulary),
        seed=secrets.randbits(53) if request.seed is None else request.seed & ((1 << 63) - 1),
        max_tokens=max_tokens,
        logprobs=logprobs,
        ignore_eos=bool(request.ignore_eos),
    )


def check_biases(tokens: Iterable[int], vocabulary: int) -> None:
    """Raise BadRequest for a token that the vocabulary lacks."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            msg = f"logit_bias: token id {token} does not exist; the vocabulary has ids 0 to {vocabulary - 1}"
            raise BadRequest(msg, "logit_bias")


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _biases(biases: Mapping[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            msg = f"logit_bias: expected token ids as keys, got {key[:40]!r}"
            raise BadRequest(msg, "logit_bias")
    # "7" and "07" are one token: the later one counts, as with equal keys in JSON.
    pairs = {int(key): value for key, value in biases.items()}
    check_biases(pairs, vocabulary)
    return tuple(pairs.items())
