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

    def fitting(self, drafts: list[int]) -> list[int]:
        """Those of `drafts`, from the first on, that the grammar takes."""
        return drafts if self.matcher is None else drafts[: self.matcher.takes(drafts)]

    def matchers(self, drafts: Sequence[int]) -> list[Matcher]:
        """Places in the grammar before the next token, and before the one after each draft; [] where all is free.

        The first is the request's own, the others are copies. The grammar must take the drafts (`fitting`).
        """
        if self.matcher is None:
            return []
        places = [self.matcher]
        for token in drafts:
            places.append(places[-1].copy())
            places[-1].advance([token])
        return places

    def rows(self, position: int, drafts: Sequence[int]) -> list[SamplingRow]:
        """Copy what the forward thread needs to draw the token at `position`, and those after each of `drafts`.

        Each row takes the drafts before it as drawn: whenever it counts, they were.
        """
        return [self._row(position + index, drafts[:index]) for index in range(len(drafts) + 1)]

    def _row(self, position: int, drawn: Sequence[int]) -> SamplingRow:
        params = self._params
        return SamplingRow(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            position=position,
            logprobs=None if params.logprobs < 0 else params.logprobs,
            penalties=self._penalties(drawn),
        )

    def _penalties(self, drawn: Sequence[int]) -> Penalties | None:
        if self._counts is None and self._bias is None:
            return None
        params = self._params
        return Penalties(
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            seen=None if self._counts is None else self._counts.seen(drawn),
            bias=self._bias,
        )
