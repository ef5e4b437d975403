"""Drafts by looking up: what followed where the sequence last read as it does at its end.

Of the latest places where its last two tokens stood, that one counts whose tokens before agree furthest back. The index
grows with the sequence, in constant time a token, and by a bounded number of tokens at a time: a long prompt holds up
nobody's step.
"""

from array import array
from collections.abc import Iterator, Sequence

PLACES = 16
"""Latest places that are looked at."""
LONGEST = 32
"""Tokens that are compared at a place."""
INDEXED_AT_ONCE = 1024


class PromptLookup:
    """The index of one sequence, which only ever grows."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        """Two tokens -> position after the latest place where they stood."""
        self._earlier = array("i", (0, 0))
        """For each position, the one after the place before where the same two tokens stood; 0: none."""

    def drafts(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess up to `most` tokens after `tokens`: those of the last call, and what has come since.

        Empty where the end is new, and until the index has caught up with a long sequence.
        """
        self._extend(tokens)
        if len(self._earlier) < len(tokens) or len(tokens) < 2:
            return []
        # The latest of the longest: `max` keeps the first.
        best = max(self._places(tokens), key=lambda position: _agreeing(tokens, position), default=0)
        return _copied(tokens, best, most) if best else []

    def _extend(self, tokens: Sequence[int]) -> None:
        first = len(self._earlier)
        for position in range(first, min(len(tokens), first + INDEXED_AT_ONCE)):
            pair = tokens[position - 2], tokens[position - 1]
            self._earlier.append(self._latest.get(pair, 0))
            self._latest[pair] = position

    def _places(self, tokens: Sequence[int]) -> Iterator[int]:
        """Positions after the places where the last two tokens stood before, latest first."""
        position = self._latest.get((tokens[-2], tokens[-1]), 0)
        for _ in range(PLACES):
            if not position:
                return
            yield position
            position = self._earlier[position]


def _agreeing(tokens: Sequence[int], position: int) -> int:
    """Tokens before `position` that are those at the end."""
    most = min(position, LONGEST)
    return next((count for count in range(2, most) if tokens[position - 1 - count] != tokens[-1 - count]), most)


def _copied(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Copy `count` tokens from `start` on; at the end of the tokens it goes on with what it has copied, as a loop."""
    drafts: list[int] = []
    for position in range(start, start + count):
        beyond = position - len(tokens)
        drafts.append(tokens[position] if beyond < 0 else drafts[beyond])
    return drafts
