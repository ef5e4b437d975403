"""ZeroMQ sockets as every node opens them, and the pump that reads one inside the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import zmq
import zmq.auth
from kvferry_proto.codec import MAX_FRAME_BYTES

from kvferry_node.errors import SettingsError

Socket: TypeAlias = "zmq.Socket[bytes]"

HIGH_WATER = 1024
"""Messages queued per peer and direction."""
LINGER_MS = 500
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
_BATCH = 64
"""Messages read in one turn of the loop, so that one loud peer leaves room for everything else."""


class Curve(msgspec.Struct, frozen=True):
    """The cluster's CURVE key pair. Who holds the public key may talk to the nodes; the secret stays on them."""

    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: str) -> "Curve | None":
        """Read a certificate file written by zmq.auth.create_certificates; None for an empty path.

        Raises SettingsError if the file is missing or holds no pair.
        """
        if not path:
            return None
        try:
            public, secret = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            msg = f"--curve-key-file {path}: {error}"
            raise SettingsError(msg) from None
        if secret is None:
            msg = f"--curve-key-file {path}: the file has no secret key; nodes need the pair"
            raise SettingsError(msg)
        return cls(public, secret)


def open_router(curve: Curve | None) -> Socket:
    """Return a ROUTER socket that is told when it writes to nobody, and lets a returning peer have its name back."""
    socket = _open(zmq.ROUTER)
    socket.router_mandatory = True
    socket.router_handover = True
    if curve is not None:
        socket.curve_secretkey = curve.secret
        socket.curve_server = True
    return socket


def open_dealer(identity: bytes, curve: Curve | None) -> Socket:
    """Return a DEALER socket. What is sent before it is connected waits in its queue, bounded like any other."""
    socket = _open(zmq.DEALER)
    socket.identity = identity
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 1000
    if curve is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = curve.public
    return socket


class Returns:
    """Tells of every connection of a DEALER socket but the first: the one before it broke, and what was under way on
    it, in either direction, may be lost."""

    def __init__(self, socket: Socket, on_return: Callable[[], None]) -> None:
        """Needs a running loop; `on_return` must not raise."""
        self._socket = socket
        self._on_return = on_return
        self._connections = 0
        self._monitor: Socket = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        self._pump = Pump(self._monitor, self._take)

    def look(self) -> None:
        """Tell now: before anything that came by the new connection is handed on."""
        while True:
            try:
                self._take(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return

    def close(self) -> None:
        """Stop; before the socket is closed."""
        self._pump.stop()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _take(self, _parts: list[bytes]) -> None:
        self._connections += 1
        if self._connections > 1:
            self._on_return()


def _open(kind: int) -> Socket:
    socket: Socket = zmq.Context.instance().socket(kind)
    socket.ipv6 = True
    socket.set_hwm(HIGH_WATER)
    socket.linger = LINGER_MS
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
    return socket


def bound_endpoint(socket: Socket) -> str:
    """Return the endpoint that a socket is bound to, its port included."""
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def flush_sockets() -> None:
    """Close what is open and wait, at most LINGER_MS, until queued messages have left. At the end of a process."""
    zmq.Context.instance().destroy(linger=LINGER_MS)


class Pump:
    """Reads a socket as long as it lives and hands every multipart to a function that must not raise.

    ZeroMQ's file descriptor is edge triggered, and sending can swallow an edge; hence `kick` after every send.
    """

    def __init__(self, socket: Socket, take: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        self._fd = int(socket.fd)
        self._loop.add_reader(self._fd, self._drain)
        self.kick()

    def kick(self) -> None:
        """Look at the socket in the loop's next turn."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._drain)

    def stop(self) -> None:
        """Stop reading; before the socket is closed."""
        self._loop.remove_reader(self._fd)
        if self._soon is not None:
            self._soon.cancel()

    def _drain(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        for _ in range(_BATCH):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)
        if not self._socket.closed:
            self.kick()
