"""One step's work: which tokens of which sequences run, and where their keys and values go."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry_engine.errors import BatchError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SequenceSlice:
    """The tokens of one sequence that run in this step."""

    tokens: Sequence[int] | NDArray[np.integer]
    start: int
    """Position of the first of `tokens`: so many tokens of the sequence are in the pool already."""
    pages: Sequence[int] | NDArray[np.integer]
    """Page table from position 0 on; covers at least start + len(tokens) tokens."""
    want_logits: int = 1
    """After how many of the last `tokens` the logits are asked for: more than 1 where some are drafts."""
    following: int | None = None
    """The token after the last of `tokens`, where known: what a drafting layer keeps of a token needs the next."""


@dataclass(frozen=True)
class ForwardBatch:
    """The slices of one step, flattened: T tokens of B sequences, sequence after sequence.

    Arrays are on the host unless they are torch tensors, which are on `device`.
    """

    page_size: int
    device: str
    slices: Sequence[SequenceSlice]
    token_ids: Ints
    """Token ids, [T]."""
    tokens: torch.Tensor
    """The same on `device`, int64 [T]."""
    positions: torch.Tensor
    """Positions in their sequences, int64 [T]."""
    slot_pages: Ints
    """Page that each token's K and V go to, [T]."""
    slot_offsets: Ints
    """Place of each token within its page, [T]."""
    q_lens: Ints
    """Tokens of each sequence in this step, [B]."""
    kv_lens: Ints
    """Tokens of each sequence in the pool after this step, [B]."""
    owners: Ints
    """Sequence of each token, [T]."""
    q_starts: Ints
    """Index of each sequence's first token among the T, [B]."""
    page_table: Ints
    """Pages of each sequence, [B, most pages]; beyond its last page a row repeats its first."""
    logit_rows: torch.Tensor
    """Index among the T of every token after which logits are wanted, int64, in their order."""

    @classmethod
    def build(cls, slices: Sequence[SequenceSlice], *, page_size: int, device: str = "cpu") -> "ForwardBatch":
        """Flatten `slices`; raises BatchError when one is empty, lacks pages, wants logits after more tokens than it
        has, or two write to one place."""
        if not slices:
            msg = "a batch needs at least one sequence"
            raise BatchError(msg)
        q_lens = np.array([len(piece.tokens) for piece in slices], dtype=np.int64)
        starts = np.array([piece.start for piece in slices], dtype=np.int64)
        kv_lens = starts + q_lens
        table = _page_table(slices, q_lens, starts, -(-kv_lens // page_size))
        q_starts = np.cumsum(q_lens) - q_lens
        owners = np.repeat(np.arange(len(slices)), q_lens)
        positions = np.arange(len(owners)) - (q_starts - starts)[owners]
        slot_pages = table[owners, positions // page_size]
        slot_offsets = positions % page_size
        _check_slots(slot_pages * page_size + slot_offsets)
        tokens = np.concatenate([np.asarray(piece.tokens, dtype=np.int64) for piece in slices])
        return cls(
            page_size=page_size,
            device=device,
            slices=slices,
            token_ids=tokens,
            tokens=torch.from_numpy(tokens).to(device),
            positions=torch.from_numpy(positions).to(device),
            slot_pages=slot_pages,
            slot_offsets=slot_offsets,
            q_lens=q_lens,
            kv_lens=kv_lens,
            owners=owners,
            q_starts=q_starts,
            page_table=table,
            logit_rows=torch.from_numpy(_logit_rows(slices, q_starts + q_lens, q_lens)).to(device),
        )

    def __len__(self) -> int:
        """Sequences in the batch."""
        return len(self.q_lens)

    @property
    def token_count(self) -> int:
        """Tokens in the batch."""
        return len(self.slot_pages)

    @property
    def wants_logits(self) -> bool:
        """Whether any sequence asks for logits."""
        return len(self.logit_rows) > 0

    @cached_property
    def opened_pages(self) -> Ints:
        """Pages that get their first token in this step and are not filled by it: what is left in them is stale."""
        opened: Ints = self.slot_pages[self.slot_offsets == 0]
        if not len(opened):
            return opened  # most decode steps, and the next line takes 50 us
        filled = self.slot_pages[self.slot_offsets == self.page_size - 1]
        return np.setdiff1d(opened, filled, assume_unique=True)

    def check_fits(self, *, vocab_size: int, max_positions: int, pages: int) -> None:
        """Raise BatchError when a token, a position or a page is outside the model or the pool."""
        self._check_range("token id", self.token_ids, vocab_size)
        self._check_range("position", self.kv_lens - 1, max_positions)
        self._check_range("page", self.page_table, pages)

    def _check_range(self, what: str, values: NDArray[np.int64], limit: int) -> None:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limit:
            msg = f"{what} {low if low < 0 else high} is outside 0..{limit - 1}"
            raise BatchError(msg)


def _page_table(slices: Sequence[SequenceSlice], q_lens: Ints, starts: Ints, needed: Ints) -> Ints:
    """Pages of each sequence that hold its tokens after this step, [B, most pages]."""
    table = np.empty((len(slices), int(needed.max())), dtype=np.int64)
    for index, (piece, count) in enumerate(zip(slices, needed.tolist(), strict=True)):
        if q_lens[index] == 0 or starts[index] < 0:
            msg = f"sequence {index} runs {q_lens[index]} tokens from position {starts[index]}"
            raise BatchError(msg)
        pages = piece.pages[:count]
        if len(pages) < count:
            msg = f"sequence {index} has {len(pages)} pages and needs {count}"
            raise BatchError(msg)
        table[index, :count] = pages
        table[index, count:] = pages[0]
    return table


def _logit_rows(slices: Sequence[SequenceSlice], ends: Ints, q_lens: Ints) -> Ints:
    """Indices among the T of the last `want_logits` tokens of each sequence; `ends` is one past each one's last."""
    counts = np.array([piece.want_logits for piece in slices], dtype=np.int64)
    if (counts > q_lens).any() or (counts < 0).any():
        index = int(np.argmax((counts > q_lens) | (counts < 0)))
        msg = f"sequence {index} runs {q_lens[index]} tokens and wants logits after {counts[index]}"
        raise BatchError(msg)
    before = np.cumsum(counts) - counts
    rows: Ints = np.arange(counts.sum()) + np.repeat(ends - counts - before, counts)
    return rows


def _check_slots(slots: Ints) -> None:
    if len(set(slots.tolist())) != len(slots):
        msg = "two tokens of the batch would be written to the same place of the same page"
        raise BatchError(msg)
