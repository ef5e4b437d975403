"""Checks of the machine: Python, torch, cores, memory, limits, shared memory."""

import importlib.metadata
import os
import resource
import shutil
import sys
from pathlib import Path

import psutil

from kvferry.cli.doctor.finding import Finding, fail, ok, warn

OLDEST_PYTHON = (3, 11)
LEAST_CORES = 2
LEAST_MEMORY = 4 << 30
"""Bytes that one prefiller and two decoders of the default model take, roughly."""
LEAST_SHM = 256 << 20
"""Bytes; the shm provider keeps its queues in /dev/shm, and Docker gives 64 MiB."""
LEAST_MEMLOCK = 1 << 30
"""Bytes; a NIC pins the whole KV cache, whose default size this is."""


def python() -> Finding:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return fail("python", version, "install Python 3.11 or newer")
    return ok("python", f"{version} ({sys.executable})")


def torch() -> Finding:
    """PyTorch, without importing it: that takes seconds."""
    try:
        return ok("torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return warn("torch", "not installed", "prefillers and decoders need it: pip install 'kvferry[worker]'")


def cores() -> Finding:
    """CPU cores that this process may use."""
    count = len(os.sched_getaffinity(0))
    if count < LEAST_CORES:
        return warn("cores", f"{count}", "models on the CPU will be slow, and pollers compete with them")
    return ok("cores", f"{count}")


def memory() -> Finding:
    """Memory that is to be had now."""
    free = psutil.virtual_memory().available
    text = f"{gib(free)} available of {gib(psutil.virtual_memory().total)}"
    if free < LEAST_MEMORY:
        return warn("memory", text, "start fewer nodes, or give them less with --kv-memory")
    return ok("memory", text)


def memlock() -> Finding:
    """How much memory may be pinned."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"soft {_limit(soft)}, hard {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft < LEAST_MEMLOCK:
        advice = (
            "NICs (verbs, efa) can't register the KV cache; tcp and shm can. `ulimit -l unlimited`, memlock in "
            "/etc/security/limits.conf, LimitMEMLOCK=infinity of a systemd unit, or ulimits: memlock: -1 in compose"
        )
        return warn("memlock", text, advice)
    return ok("memlock", text)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:  # noqa: S108  # the place itself is looked at
    """Room in /dev/shm."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return warn("shared memory", f"{path}: {error.strerror}", "the shm provider won't work; mount a tmpfs there")
    text = f"{gib(usage.free)} free of {gib(usage.total)} in {path}"
    if usage.free < LEAST_SHM:
        return warn("shared memory", text, "the shm provider needs room: remove what is left there, or --shm-size 1g")
    return ok("shared memory", text)


def gib(size: int) -> str:
    """Say a size in bytes."""
    return f"{size / (1 << 30):.1f} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value / (1 << 20):.0f} MiB"
