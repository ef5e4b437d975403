"""Text from tokens as they come, and stop strings.

Text is decided late: a character may need several tokens, and what looks like text may be the beginning of a stop
string. Neither is emitted before it is certain; what was emitted is never taken back.

tokenizers' DecodeStream is not used: it has no way to end (a last, incomplete character is lost), and it raises on some
sequences that `decode` takes.
"""

from collections.abc import Collection, Sequence

from kvferry_router.tokenizer import Tokenizer

# Tokenizers that mark word beginnings drop a leading space unless they see what stands before it.
CONTEXT_TOKENS = 6
INCOMPLETE = "\ufffd"
# No character is longer than 4 bytes; whoever sends more incomplete tokens sends garbage, and gets it as such.
MAX_HELD_TOKENS = 16


class Detokenizer:
    """One answer's text."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], spoken: Collection[int] = ()) -> None:
        """`context`: the prompt, whose tail decides about a leading space; `spoken`: special tokens that are text."""
        self._tokenizer = tokenizer
        self._window = list(context[-CONTEXT_TOKENS:])
        self._known = len(self._window)
        self._spoken = spoken

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain with `ids`."""
        # One by one: with several at once a character that is complete would wait for one that is not.
        return "".join([self._step(token) for token in ids])

    def _step(self, token: int) -> str:
        if token in self._spoken:
            return self.finish() + self._tokenizer.token_text(token)
        self._window.append(token)
        text = self._new_text()
        if text.endswith(INCOMPLETE) and len(self._window) - self._known < MAX_HELD_TOKENS:
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        """Return the rest, with U+FFFD for an incomplete character."""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._known])
        return self._tokenizer.decode(self._window)[len(before) :]

    def _advance(self) -> None:
        self._window = self._window[-CONTEXT_TOKENS:]
        self._known = len(self._window)


class StopStrings:
    """Watches an answer's text for stop strings, across the borders of tokens."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Return what can be emitted: nothing of a stop string, and nothing that may become one."""
        if self.hit:
            return ""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit = True
            self._held = ""
            return text[: min(found)]
        keep = self._beginning_at_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back: the answer is over, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_end(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
