"""Addresses: what a socket binds to and what is published to peers."""

import ipaddress
import socket

from kvferry_node.errors import BindError


def resolve(host: str) -> str:
    """Return the numeric address of `host`, fit to bind to and to publish.

    Names are resolved here because ZeroMQ binds to numbers only; a container thus publishes the address that its own
    name has. Raises BindError for an unknown name.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        msg = f"--host {host}: no such address ({error})"
        raise BindError(msg) from None
    return str(found[0][4][0])


def published(host: str) -> str:
    """Resolve `host` and check that peers can reach what is published.

    Raises BindError for a wildcard address, which means "here" to whoever reads it.
    """
    address = resolve(host)
    if ipaddress.ip_address(address).is_unspecified:
        msg = f"--host {host} cannot be published to peers: name the address at which they reach this node"
        raise BindError(msg)
    return address


def authority(address: str, port: int | str) -> str:
    """Return address:port as it stands in URLs and endpoints."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
