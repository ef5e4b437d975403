"""How an answer's tokens are drawn."""

from typing import Annotated

import msgspec

MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
# Beyond these a logit that is multiplied or divided may leave the numbers.
Repetition = Annotated[float, msgspec.Meta(ge=0.01, le=100)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


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
    min_p: Fraction = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one; 0 keeps all."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of each token that the answer holds."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of each token as often as the answer holds it."""
    repetition_penalty: Repetition = 1.0
    """Divides the logit of each token of prompt and answer, or multiplies it where it is negative; 1 is off."""
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], msgspec.Meta(max_length=MAX_BIASED_TOKENS)] = ()
    """Pairs of a token and what is added to its logit."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    logprobs: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOP_LOGPROBS)] = -1
    """-1: none; 0: of the chosen token; n: of the n likeliest beside it."""
    ignore_eos: bool = False
