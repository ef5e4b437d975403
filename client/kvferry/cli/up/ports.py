"""TCP ports on this machine: which are free, and some that are."""

import random
import socket

# Below the range from which the kernel takes ports for outgoing connections, which could take one before we do.
LOWEST, HIGHEST = 20000, 32000
TRIES = 200


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind to the port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


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
