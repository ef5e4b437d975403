"""Speculation: how many tokens a step guesses ahead for each request, and which.

A step computes a request's last token and its drafts together, and draws after each of them. A draft counts if it is
what was drawn in its place, so an answer has the tokens that it would have without, also where it is sampled: what is
drawn follows from the seed, the position and the logits alone.
"""

from kvferry_decoder.ngram import PromptLookup
from kvferry_decoder.request import Request
from kvferry_decoder.settings import Speculate

MOST_ROWS = 32
"""Tokens that the drawing requests of a step have together at most, drafts included. A step reads all weights, however
few rows it has: some more cost little, until it is bound by computing."""


class Speculation:
    """A decoder's way to draft. `most_context`: tokens that a request may have."""

    def __init__(self, way: Speculate = "off", tokens: int = 0, most_context: int = 0) -> None:
        self.way = way
        self._tokens = 0 if way == "off" else tokens
        self._most_context = most_context

    @property
    def by_model(self) -> bool:
        """Whether the model's drafting layer guesses, at the end of a step, for the next."""
        return self.way == "mtp"

    def share(self, drawing: int) -> int:
        """Drafts that each of `drawing` requests may have in a step: none when there are many."""
        return min(self._tokens, max(0, MOST_ROWS // drawing - 1)) if drawing else 0

    def drafts(self, request: Request, most: int) -> list[int]:
        """Guess up to `most` of the tokens that come next: no more than may still be drawn before the last."""
        most = min(most, request.room(self._most_context) - 1)
        if most <= 0:
            return []
        drafts = self._guess(request, most)
        ends = [index for index, token in enumerate(drafts) if request.ends_with(token)]
        return request.drawing.fitting(drafts[: ends[0]] if ends else drafts)

    def further(self, request: Request, share: int, drafts: int) -> int:
        """How many tokens the drafting layer is to guess after a step that verifies `drafts`: what the next can use."""
        return max(0, min(share, request.room(self._most_context) - drafts - 2)) if self.by_model else 0

    def _guess(self, request: Request, most: int) -> list[int]:
        if self.by_model:
            return list(request.guesses[:most])
        request.lookup = request.lookup or PromptLookup()
        return request.lookup.drafts(request.tokens, most)
