"""TCP ports on this machine: which are free, and some that are."""

import errno
import random
import socket
from typing import NamedTuple

# Below the range from which the kernel takes ports for outgoing connections, which could take one before we do.
LOWEST, HIGHEST = 20000, 32000
TRIES = 200


class Refusal(NamedTuple):
    """Why a server can't bind."""

    text: str
    of_host: bool = False
    """Whether it is the host's fault: another port would not do."""


def refusal(host: str, port: int) -> Refusal | None:
    """Return why a server could not bind to the port now, or None if it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (socket.gaierror, UnicodeError) as error:
            return Refusal(f"{host} can't be resolved: {error}", of_host=True)
        except OSError as error:
            return _refusal(host, port, error)
    return None


def _refusal(host: str, port: int, error: OSError) -> Refusal:
    if error.errno == errno.EADDRNOTAVAIL:
        return Refusal(f"{host} is no address of this machine", of_host=True)
    if error.errno == errno.EADDRINUSE:
        return Refusal(f"port {port} on {host} is in use")
    return Refusal(f"port {port} on {host} can't be taken: {error.strerror}")


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind to the port now."""
    return refusal(host, port) is None


def pick(host: str, count: int) -> list[int]:
    """Draw `count` different free ports. Raises OSError if there are not enough."""
    found: list[int] = []
    for port in random.sample(range(LOWEST, HIGHEST), TRIES):
        if len(found) == count:
            break
        if is_free(host, port):
            found.append(port)
    if len(found) < count:
        msg = f"found no {count} free ports between {LOWEST} and {HIGHEST} on {host}"
        raise OSError(msg)
    return found
