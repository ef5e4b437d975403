"""Block hashes: what a page's content is called.

A block is the tokens of one full page. Its hash covers its own tokens and, through its parent's hash, all before
them, so equal hashes mean equal prefixes. The seed holds the model and a salt (adapter, tenant), so that pages are
never shared across them.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvferry_proto.ints import Int32s


def block_hashes(tokens: Sequence[int], page_size: int, model: str, salt: str = "") -> list[int]:
    """Return a signed 64-bit hash for each full page of `tokens`. Raises ValueError for a page size below 1."""
    hashes: list[int] = []
    extend_hashes(hashes, tokens, page_size, model, salt)
    return hashes


def extend_hashes(hashes: list[int], tokens: Sequence[int], page_size: int, model: str, salt: str = "") -> None:
    """Add the hashes of `tokens` that `hashes`, those of their beginning, does not have yet.

    Raises ValueError for a page size below 1.
    """
    if page_size < 1:
        msg = f"the page size must be at least 1, got {page_size}"
        raise ValueError(msg)
    parent = struct.pack("<q", hashes[-1]) if hashes else _seed(model, salt)
    data = memoryview(Int32s(tokens[len(hashes) * page_size :]).to_frame())
    step = 4 * page_size
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(data[start : start + step], key=parent, digest_size=8).digest()
        hashes.append(struct.unpack("<q", parent)[0])


def _seed(model: str, salt: str) -> bytes:
    # The length keeps a model and salt apart from another pair whose concatenation is the same.
    return hashlib.blake2b(f"{len(model)}:{model}{salt}".encode(), digest_size=8).digest()
