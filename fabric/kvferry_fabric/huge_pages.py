"""Which large pages this machine has for shared memory, and which a piece of it is in.

To copy scattered pages within a host is mostly work for the page table: into a pool of 1 GiB that is in pages of 2 MiB,
reserved or transparent, KV pages of 4, 16 and 64 KiB come at 3.3, 2.4 and 2.5 times the rate (2.1 -> 7.0, 3.7 -> 8.8,
6.0 -> 15 GB/s here). Over tcp, and for the time that registering takes, it makes no difference.
"""

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_ON_REQUEST = {"always", "within_size", "advise", "force"}
"""Settings with which shared memory that asks for transparent huge pages gets them."""


class Backing(StrEnum):
    """What pages a piece of shared memory is in."""

    RESERVED = "reserved huge pages"
    """All of it, from the start."""
    TRANSPARENT = "transparent huge pages"
    """Where the kernel finds them when memory is first touched."""
    ORDINARY = "ordinary pages"


class HugePages(NamedTuple):
    """What there is to be had."""

    page_bytes: int
    """Of the default size; 0: the kernel has none."""
    reserved: int
    free: int
    """Of the reserved ones, in pages."""
    transparent: bool
    """Whether shared memory gets them where it asks."""


def huge_pages(meminfo: Path = _MEMINFO, transparent: Path = _TRANSPARENT) -> HugePages:
    """Look at this machine; what cannot be read is not there."""
    told = _lines(meminfo)
    return HugePages(
        page_bytes=told.get("Hugepagesize", 0) << 10,
        reserved=told.get("HugePages_Total", 0),
        free=told.get("HugePages_Free", 0),
        transparent=_chosen(transparent) in _ON_REQUEST,
    )


def _lines(meminfo: Path) -> dict[str, int]:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: int(rest.split()[0]) for name, _, rest in pairs if rest.split()[:1]}


def _chosen(setting: Path) -> str:
    """The word in brackets."""
    try:
        text = setting.read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
