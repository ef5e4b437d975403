"""Two hosts with two links between them, as network namespaces of this machine; needs root and iproute2."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

OURS, THEIRS = ("10.77.1.1", "10.77.2.1"), ("10.77.1.2", "10.77.2.2")
"""Addresses of hosts "a" and "b", one for each link."""


class Hosts:
    """Host "a" has 10.77.1.1 and 10.77.2.1, host "b" 10.77.1.2 and 10.77.2.2; link n joins 10.77.n.1 and 10.77.n.2."""

    def __init__(self) -> None:
        self._prefix = f"kvferry-{os.getpid()}"

    def name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def inside(self, host: str) -> tuple[str, ...]:
        """The command that runs another one on a host."""
        return ("ip", "netns", "exec", self.name(host))

    def open(self) -> None:
        for host in "ab":
            ip("netns", "add", self.name(host))
            self.ip(host, "link", "set", "lo", "up")
        for link in "12":
            ip("link", "add", f"a{link}", "netns", self.name("a"), "type", "veth",
               "peer", "name", f"b{link}", "netns", self.name("b"))  # fmt: skip
            for number, host in enumerate("ab", 1):
                self.ip(host, "addr", "add", f"10.77.{link}.{number}/24", "dev", f"{host}{link}")
                self.ip(host, "link", "set", f"{host}{link}", "up")

    def close(self) -> None:
        for host in "ab":
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True, timeout=30, check=False)

    def ip(self, host: str, *arguments: str) -> None:
        ip("-n", self.name(host), *arguments)

    @contextmanager
    def entered(self, host: str) -> Iterator[None]:
        """On a host: this thread, and the threads and processes that it starts meanwhile."""
        there = Path("/var/run/netns") / self.name(host)
        with Path("/proc/thread-self/ns/net").open("rb") as home, there.open("rb") as away:
            _enter(away)
            try:
                yield
            finally:
                _enter(home)


def _enter(namespace: BinaryIO) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), 0):
        raise OSError(ctypes.get_errno(), "setns")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, timeout=30, check=True)


@contextmanager
def hosts_if_possible() -> Iterator[Hosts | None]:
    """Two hosts, or None where namespaces can't be made."""
    made = Hosts()
    try:
        try:
            made.open()
        except (OSError, subprocess.CalledProcessError):
            yield None
        else:
            yield made
    finally:
        made.close()
