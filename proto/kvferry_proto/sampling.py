"""How an answer's tokens are drawn."""

from typing import Annotated

import msgspec

MAX_TOP_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of a request, validated on every hop.

    A request draws its token at position p with a number computed from (seed, p) alone, so the same seed gives the
    same answer in any batch and on any decoder.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """0 takes all."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    logprobs: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOP_LOGPROBS)] = -1
    """-1: none; 0: of the chosen token; n: of the n likeliest beside it."""
    ignore_eos: bool = False
