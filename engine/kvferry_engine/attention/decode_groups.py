"""Which rows of a decode step attend in one call, where a call pads every row to its longest."""

from collections.abc import Iterator

import numpy as np

from kvferry_engine.batch import ForwardBatch, Ints

CALL_TOKENS = 256
"""Tokens of padding that cost about as much as a further call in every layer, with pages of three KV heads."""


def decode_groups(batch: ForwardBatch) -> Iterator[Ints]:
    """Yield indices of the sequences that run one token, ascending in each group, so that little is padded.

    Without that, one long document in a batch makes every short chat beside it as slow as itself.
    """
    decodes = np.flatnonzero(batch.q_lens == 1)
    rest = decodes[np.argsort(-batch.kv_lens[decodes], kind="stable")]
    while len(rest):
        count = _first_group(batch.kv_lens[rest])
        yield np.sort(rest[:count])
        rest = rest[count:]


def _first_group(kv_lens: Ints) -> int:
    """How many of the descending `kv_lens` attend with the longest: until a group for all others saves a call."""
    behind = np.arange(len(kv_lens), 0, -1)
    worth = (kv_lens[0] - kv_lens) * behind > CALL_TOKENS
    return int(np.argmax(worth)) or len(kv_lens)
