"""Sets of CPUs, as hwloc and Linux write them."""

import re
from collections.abc import Iterable

from kvferry_fabric.topology.errors import TopologyError

WORD_BITS = 32
MOST_CPUS = 1 << 16
"""More than any machine has; a longer list is nonsense, and would take memory."""

_WORD = re.compile(r"(?:0x)?([0-9a-fA-F]{1,8})?")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def from_mask(text: str) -> frozenset[int]:
    """Read hwloc's form: 32-bit hexadecimal words, the highest first, an empty word being 0 (0x1,,0x0000ffff).

    Raises TopologyError if it is none; so for an infinite set (0xf...f), which no machine's CPUs are.
    """
    words = text.strip().split(",")
    if len(words) * WORD_BITS > MOST_CPUS:
        msg = f"a CPU set of {len(words)} words is too long"
        raise TopologyError(msg)
    mask = 0
    for word in words:
        match = _WORD.fullmatch(word.strip())
        if match is None or (len(words) == 1 and not word.strip()):
            msg = f"{text[:80]!r} is no CPU set"
            raise TopologyError(msg)
        mask = mask << WORD_BITS | int(match[1] or "0", 16)
    return frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def from_list(text: str) -> frozenset[int]:
    """Read Linux' form: 0-3,8,10-11. Empty text is the empty set. Raises TopologyError if it is none."""
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.strip().split(","))):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MOST_CPUS:
            msg = f"{text[:80]!r} is no list of CPUs"
            raise TopologyError(msg)
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def to_list(cpus: Iterable[int]) -> str:
    """Write Linux' form."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
