"""A step's inputs on their way from the lead to the other ranks: one run of int32 numbers for each step.

work, sequences, then for each sequence: start, tokens, pages, want_logits, following; then all tokens, then all pages,
then the bytes of the hidden states that are drafted from
"""

import enum
import socket
import struct
from typing import NamedTuple

import numpy as np
import torch

from kvferry_engine.batch import SequenceSlice

_LENGTH = struct.Struct("=Q")
_SHAPE_INTS = 5
_UNKNOWN = -1
"""In place of a following token."""


class Work(enum.IntEnum):
    """What is computed of a step's slices."""

    KEEP = 0
    """Keys and values alone."""
    LOGITS = 1
    """The logits that sequences want."""
    HIDDEN = 2
    """The hidden states that these would be made of."""
    DRAFT = 3
    """The drafting layer, from hidden states that come along, and the logits that sequences want of it."""


class Step(NamedTuple):
    """What every rank computes next."""

    slices: list[SequenceSlice]
    work: Work
    hidden: torch.Tensor | None = None
    """[T, E] of the slices' tokens, to draft from; arrives as bytes, int32 [numbers]."""


def pack(step: Step, page_size: int) -> bytes:
    """Lay a step out, its length in front; pages beyond its last token stay here."""
    shapes, tokens, pages = [], [], []
    for piece in step.slices:
        needed = -(-(piece.start + len(piece.tokens)) // page_size)
        following = _UNKNOWN if piece.following is None else piece.following
        shapes.append((piece.start, len(piece.tokens), needed, piece.want_logits, following))
        tokens.append(np.asarray(piece.tokens, dtype=np.int32))
        pages.append(np.asarray(piece.pages[:needed], dtype=np.int32))
    head = np.array([step.work, len(step.slices), *np.ravel(shapes)], dtype=np.int32)
    # An even number of 16-bit numbers a row, as of every model there is.
    states = [] if step.hidden is None else [step.hidden.cpu().contiguous().view(torch.int32).flatten().numpy()]
    numbers = np.concatenate([head, *tokens, *pages, *states])
    return _LENGTH.pack(numbers.nbytes) + numbers.tobytes()


def receive(connection: socket.socket) -> Step | None:
    """Wait for the next step; None once the lead has closed its end, or is gone."""
    length = _exactly(connection, _LENGTH.size)
    if length is None:
        return None
    body = _exactly(connection, _LENGTH.unpack(length)[0])
    return None if body is None else _unpack(np.frombuffer(body, dtype=np.int32))


def _unpack(numbers: np.ndarray) -> Step:
    work, count = numbers[:2]
    shapes = numbers[2 : 2 + _SHAPE_INTS * count].reshape(count, _SHAPE_INTS)
    rest = numbers[2 + _SHAPE_INTS * count :]
    tokens, pages, hidden = np.split(rest, np.cumsum(shapes[:, 1:3].sum(axis=0)))
    of_tokens = np.split(tokens, np.cumsum(shapes[:-1, 1]))
    of_pages = np.split(pages, np.cumsum(shapes[:-1, 2]))
    slices = [
        SequenceSlice(
            tokens=piece,
            start=int(shape[0]),
            pages=table,
            want_logits=int(shape[3]),
            following=None if shape[4] == _UNKNOWN else int(shape[4]),
        )
        for shape, piece, table in zip(shapes, of_tokens, of_pages, strict=True)
    ]
    return Step(slices, Work(work), torch.from_numpy(hidden.copy()) if len(hidden) else None)


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    """Read `size` bytes; None if the other end closes first."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = connection.recv_into(view[at:])
        if not got:
            return None
        at += got
    return data
