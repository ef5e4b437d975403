"""A step's inputs on their way from the lead to the other ranks: one run of int32 numbers for each step.

flags, sequences, then for each sequence: start, tokens, pages, want_logits, following; then all tokens, then all pages
"""

import socket
import struct
from typing import NamedTuple

import numpy as np

from kvferry_engine.batch import SequenceSlice

_LENGTH = struct.Struct("=Q")
_SHAPE_INTS = 5
_UNKNOWN = -1
"""In place of a following token."""


class Step(NamedTuple):
    """What every rank computes next."""

    slices: list[SequenceSlice]
    logits: bool
    """Whether the logits that sequences want are computed at all."""


def pack(step: Step, page_size: int) -> bytes:
    """Lay a step out, its length in front; pages beyond its last token stay here."""
    shapes, tokens, pages = [], [], []
    for piece in step.slices:
        needed = -(-(piece.start + len(piece.tokens)) // page_size)
        following = _UNKNOWN if piece.following is None else piece.following
        shapes.append((piece.start, len(piece.tokens), needed, piece.want_logits, following))
        tokens.append(np.asarray(piece.tokens, dtype=np.int32))
        pages.append(np.asarray(piece.pages[:needed], dtype=np.int32))
    head = np.array([int(step.logits), len(step.slices), *np.ravel(shapes)], dtype=np.int32)
    numbers = np.concatenate([head, *tokens, *pages])
    return _LENGTH.pack(numbers.nbytes) + numbers.tobytes()


def receive(connection: socket.socket) -> Step | None:
    """Wait for the next step; None once the lead has closed its end, or is gone."""
    length = _exactly(connection, _LENGTH.size)
    if length is None:
        return None
    body = _exactly(connection, _LENGTH.unpack(length)[0])
    return None if body is None else _unpack(np.frombuffer(body, dtype=np.int32))


def _unpack(numbers: np.ndarray) -> Step:
    logits, count = numbers[:2]
    shapes = numbers[2 : 2 + _SHAPE_INTS * count].reshape(count, _SHAPE_INTS)
    rest = numbers[2 + _SHAPE_INTS * count :]
    tokens, pages = np.split(rest, [int(shapes[:, 1].sum())])
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
    return Step(slices, bool(logits))


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
