"""How a request draws its next token: its settings, the counts that penalties need, its place in its grammar."""

from collections.abc import Sequence

from kvferry_engine.grammar import GrammarError, Matcher
from kvferry_engine.penalties import LogitBias, Penalties, TokenCounts
from kvferry_engine.sampler import SamplingRow
from kvferry_proto.sampling import SamplingParams


class Drawing:
    """Grows with its request, in the event loop's thread. Without penalties it keeps, and costs, nothing per token."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], answered: Sequence[int]) -> None:
        """`answered`: what another decoder had drawn already."""
        self._params = params
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        self._counts = TokenCounts(prompt, answered) if penalised else None
        self.matcher: Matcher | None = None
        """Set when the grammar is compiled; None where the answer is free."""
        self._bias = LogitBias.of(dict(params.logit_bias)) if params.logit_bias else None

    @property
    def complete(self) -> bool:
        """The grammar lets nothing follow."""
        return self.matcher is not None and self.matcher.complete

    def check(self) -> None:
        """Raise GrammarError if the grammar took too much to be followed in this step: nothing was forbidden."""
        if self.matcher is not None and self.matcher.failure:
            raise GrammarError(self.matcher.failure)

    def add(self, token: int) -> None:
        """Take a token of the answer into account. Raises GrammarError if the grammar forbids it."""
        if self.matcher is not None:
            self.matcher.advance([token])
        if self._counts is not None:
            self._counts.add(token)

    def row(self, position: int) -> SamplingRow:
        """Copy everything that the forward thread needs to draw the token at `position`."""
        params = self._params
        return SamplingRow(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            position=position,
            logprobs=None if params.logprobs < 0 else params.logprobs,
            penalties=self._penalties(),
        )

    def _penalties(self) -> Penalties | None:
        if self._counts is None and self._bias is None:
            return None
        params = self._params
        return Penalties(
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            seen=None if self._counts is None else self._counts.seen(),
            bias=self._bias,
        )
