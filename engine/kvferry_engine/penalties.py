"""What a request adds to its logits before sampling: penalties on the tokens it holds already, and biases of its own.

Only the tokens concerned are touched, those of all rows in one go: a row without any costs nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Piece = tuple[Ids, Floats]
"""Different tokens of one row, and a number for each."""

MAX_PENALTY = 2.0
MAX_BIAS = 100.0
FIRST_ROOM = 256


class Seen(NamedTuple):
    """The different tokens of a sequence, as they were when this was taken."""

    tokens: Ids
    """[N], each once."""
    generated: Ids
    """How often each was generated, [N]; 0 for those of the prompt alone."""


class TokenCounts:
    """Counts of a sequence's tokens, growing with it in constant time per token; not for two threads at once."""

    def __init__(self, prompt: Sequence[int] | Ids, generated: Sequence[int] | Ids = ()) -> None:
        """Count a prompt and what was generated already, as when another node began the answer."""
        tokens = np.unique(np.asarray(prompt, dtype=np.int64))
        self._tokens = np.append(tokens, np.zeros(FIRST_ROOM, dtype=np.int64))
        self._generated = np.zeros(len(self._tokens), dtype=np.int64)
        self._places = {token: place for place, token in enumerate(tokens.tolist())}
        for token in generated:
            self.add(int(token))

    def add(self, token: int) -> None:
        """Count one generated token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.append(self._tokens, np.zeros_like(self._tokens))
            self._generated = np.append(self._generated, np.zeros_like(self._generated))
        self._tokens[place] = token
        self._generated[place] += 1

    def seen(self, further: Sequence[int] = ()) -> Seen:
        """Copy the counts, as they were if `further` tokens were generated, for a step that runs in another thread."""
        count = len(self._places)
        new = [token for token in dict.fromkeys(further) if token not in self._places]
        places = {token: count + index for index, token in enumerate(new)}
        tokens = np.append(self._tokens[:count], np.array(new, dtype=np.int64))
        generated = np.append(self._generated[:count], np.zeros(len(new), dtype=np.int64))
        for token in further:
            generated[places[token] if token in places else self._places[token]] += 1
        return Seen(tokens, generated)


class LogitBias(NamedTuple):
    """Added to the logits of some tokens."""

    tokens: Ids
    values: Floats

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> "LogitBias":
        """Arrays of `biases`, token id -> bias; raises ValueError for a negative id or a bias beyond +-100."""
        for token, value in biases.items():
            if token < 0 or not -MAX_BIAS <= value <= MAX_BIAS:
                msg = f"logit_bias {value} of token {token} is out of range"
                raise ValueError(msg)
        return cls(np.fromiter(biases, np.int64, len(biases)), np.fromiter(biases.values(), np.float32, len(biases)))


@dataclass(frozen=True)
class Penalties:
    """How one sequence's logits differ from the model's.

    Token ids that the vocabulary lacks change nothing: they must not fail the other rows of a batch.
    """

    presence: float = 0.0
    """Subtracted once from each generated token."""
    frequency: float = 0.0
    """Subtracted from each generated token as often as it was generated."""
    repetition: float = 1.0
    """Divides the logit of each token of prompt and answer, or multiplies it where it is negative; 1 is off."""
    seen: Seen | None = field(default=None, compare=False)
    """The sequence's tokens; needed by the three above."""
    bias: LogitBias | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        limits = {
            "presence_penalty": -MAX_PENALTY <= self.presence <= MAX_PENALTY,
            "frequency_penalty": -MAX_PENALTY <= self.frequency <= MAX_PENALTY,
            "repetition_penalty": 0 < self.repetition < float("inf"),
        }
        for name, good in limits.items():
            if not good:
                msg = f"{name} {getattr(self, name.removesuffix('_penalty'))} is out of range"
                raise ValueError(msg)
        if self.seen is None and (self.presence, self.frequency, self.repetition) != (0, 0, 1):
            msg = "penalties need the counts of the sequence's tokens"
            raise ValueError(msg)

    def pieces(self) -> tuple[list[Piece], list[Piece]]:
        """Tokens whose logits are divided, and by what; tokens whose logits are added to, and what."""
        divided, added = [], []
        if self.seen is not None and self.repetition != 1:
            divided.append((self.seen.tokens, np.full(len(self.seen.tokens), self.repetition, dtype=np.float32)))
        if self.seen is not None and (self.presence or self.frequency):
            penalty = self.presence * (self.seen.generated > 0) + self.frequency * self.seen.generated
            added.append((self.seen.tokens, -penalty.astype(np.float32)))
        if self.bias is not None:
            added.append(self.bias)
        return divided, added


class Entries(NamedTuple):
    """Places in a batch's logits, and a number for each: int64 [N], int64 [N], float32 [N]."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor

    @classmethod
    def join(cls, pieces: Sequence[tuple[int, Piece]]) -> "Entries":
        """Flatten pieces of rows."""
        rows = np.repeat(
            np.array([row for row, _ in pieces], dtype=np.int64), [len(tokens) for _, (tokens, _) in pieces]
        )
        tokens = np.concatenate([tokens for _, (tokens, _) in pieces] or [np.empty(0, dtype=np.int64)])
        values = np.concatenate([values for _, (_, values) in pieces] or [np.empty(0, dtype=np.float32)])
        return cls(torch.from_numpy(rows), torch.from_numpy(tokens), torch.from_numpy(values))

    def to(self, device: torch.device) -> "Entries":
        """Return the same on a device."""
        return Entries(*(part.to(device) for part in self))

    def within(self, vocabulary: int) -> "Entries":
        """Those whose tokens the vocabulary has."""
        known = (self.tokens >= 0) & (self.tokens < vocabulary)
        return self if known.all() else Entries(self.rows[known], self.tokens[known], self.values[known])


@dataclass(frozen=True)
class LogitChanges:
    """The penalties and biases of a batch's rows."""

    divided: Entries
    """No place twice."""
    added: Entries
    """A place that is penalised and biased comes twice."""

    @classmethod
    def build(cls, rows: Sequence[Penalties | None]) -> "LogitChanges | None":
        """Gather what a batch's rows ask for; None when none asks for any."""
        asked = [(row, *penalties.pieces()) for row, penalties in enumerate(rows) if penalties is not None]
        divided = [(row, piece) for row, pieces, _ in asked for piece in pieces]
        added = [(row, piece) for row, _, pieces in asked for piece in pieces]
        return cls(Entries.join(divided), Entries.join(added)) if divided or added else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy of float32 `logits` [B, V] with the changes; repetition comes first, for it scales the model's own."""
        changed = logits.clone(memory_format=torch.contiguous_format)
        rows, tokens, values = self.divided.within(logits.shape[-1]).to(logits.device)
        before = changed[rows, tokens]
        changed[rows, tokens] = torch.where(before > 0, before / values, before * values)
        rows, tokens, values = self.added.within(logits.shape[-1]).to(logits.device)
        return changed.index_put_((rows, tokens), values, accumulate=True)
