"""Drafts by looking up: what followed the last time that the sequence read as it does at its end.

The longest of a few lengths is looked for, and the latest place where it stood. The index grows with the sequence, in
constant time a token, and by a bounded number of tokens at a time: a long prompt holds up nobody's step.
"""

from collections.abc import Sequence

LENGTHS = (4, 3, 2)
"""Tokens at the end that must have stood before; longest first. One alone says too little."""
INDEXED_AT_ONCE = 1024


class PromptLookup:
    """The index of one sequence, which only ever grows."""

    def __init__(self) -> None:
        self._followed: dict[tuple[int, ...], int] = {}
        """Run of tokens -> position after the latest place where it stood."""
        self._indexed = 0
        """Tokens before this position are known to follow what stands before them."""

    def drafts(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess up to `most` tokens after `tokens`: those of the last call, and what has come since.

        Empty where the end is new, and until the index has caught up with a long sequence.
        """
        self._extend(tokens)
        if self._indexed < len(tokens):
            return []
        for length in LENGTHS:
            found = self._followed.get(tuple(tokens[-length:]))
            if found is not None:
                return _copied(tokens, found, most)
        return []

    def _extend(self, tokens: Sequence[int]) -> None:
        first, self._indexed = self._indexed, min(len(tokens), self._indexed + INDEXED_AT_ONCE)
        for position in range(first, self._indexed):
            for length in LENGTHS:
                if position >= length:
                    self._followed[tuple(tokens[position - length : position])] = position


def _copied(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Copy `count` tokens from `start` on; at the end of the tokens it goes on with what it has copied, as a loop."""
    drafts: list[int] = []
    for position in range(start, start + count):
        beyond = position - len(tokens)
        drafts.append(tokens[position] if beyond < 0 else drafts[beyond])
    return drafts
