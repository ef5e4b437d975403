"""Checks of the fabric, and whatever else installed packages offer to check."""

import ctypes
import ctypes.util
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import entry_points

import msgspec

from kvferry.cli.doctor.finding import Finding, fail, ok, warn

GROUP = "kvferry.checks"
"""Entry points in this group name a function that returns findings as dicts: name, level, text, advice."""
FI_INFO = "fi_info"
KNOWN = ("tcp", "net", "shm", "verbs", "efa")
FI_INFO_SECONDS = 20.0


def libfabric() -> Finding:
    """The library itself."""
    name = ctypes.util.find_library("fabric")
    if name is None:
        return fail("libfabric", "not installed", "apt-get install libfabric-dev, then build the C extension again")
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return fail("libfabric", f"{name} can't be loaded: {error}", "apt-get install --reinstall libfabric1")
    version = library.fi_version()
    return ok("libfabric", f"{version >> 16}.{version & 0xFFFF} ({name})")


def providers() -> Finding:
    """Providers that this machine has, as fi_info tells."""
    if shutil.which(FI_INFO) is None:
        advice = "apt-get install libfabric-bin to see them"
        return warn("providers", "unknown: fi_info is not installed", advice)
    try:
        told = subprocess.run([FI_INFO, "-l"], capture_output=True, text=True, timeout=FI_INFO_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return warn("providers", f"fi_info did not answer within {FI_INFO_SECONDS:g} s", "a NIC driver may hang")
    names = [line.removesuffix(":") for line in told.stdout.splitlines() if line.endswith(":")]
    usable = [name for name in names if name in KNOWN]
    if not usable:
        return fail("providers", f"none of {', '.join(KNOWN)} among {names}", "reinstall libfabric")
    nics = [name for name in usable if name in {"verbs", "efa"}]
    return ok("providers", ", ".join(usable) + ("" if nics else " (no RDMA NIC: tcp or shm will carry)"))


def _remedy(error: ImportError | OSError) -> str:
    others = isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("kvferry")
    return "pip install 'kvferry[worker]'" if others else "build the C extension: make setup"


def offered() -> Iterable[Finding]:
    """Findings of installed packages' own checks; a check that can't be loaded is a finding too."""
    for entry in entry_points(group=GROUP):
        try:
            found = entry.load()()
        except (ImportError, OSError) as error:
            yield fail(entry.name, f"can't be loaded: {error}", _remedy(error))
            continue
        yield from msgspec.convert(found, list[Finding], from_attributes=True)
