"""One ZeroMQ connection to a router, watched, and replaced whole when it breaks.

libzmq would mend a broken connection by itself and keep what was queued on it. A router that has restarted knows
nothing of the requests that were open, and one that only lost the wire must not mistake the new connection for the
old one. So a link that loses its peer drops the socket with all that is in it and opens another, under a new identity.
"""

import enum
from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq
from kvferry_proto.nodes import NodeRef
from zmq.utils.monitor import recv_monitor_message

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
"""A router whose machine vanished without a word is noticed after this."""
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
HIGH_WATER = 4096
"""Messages that may wait on the socket, each way."""
LINGER_MS = 500
"""How long a closing client tries to get its last cancels out."""

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class CurveKeys(NamedTuple):
    """Keys of an encrypted connection, Z85 encoded."""

    server: bytes
    """The router's public key."""
    public: bytes
    secret: bytes


class LinkState(enum.Enum):
    """Where a link stands."""

    CONNECTING = "connecting"
    UP = "up"
    REFUSED = "refused"
    """Somebody answers at the endpoint, but not as a router (or not to us). libzmq keeps trying."""
    CLOSED = "closed"


class Watcher(NamedTuple):
    """Callbacks that keep an event loop's list of file descriptors."""

    add: Callable[[int], object]
    remove: Callable[[int], object]


class Link:
    """A DEALER to one router. Not thread-safe; nothing here blocks but `wait`."""

    def __init__(
        self, ref: NodeRef, endpoint: str, curve: CurveKeys | None = None, watcher: Watcher | None = None
    ) -> None:
        """Begin to connect. Raises ValueError for an endpoint that ZeroMQ can't read."""
        self.endpoint = endpoint
        self.state = LinkState.CONNECTING
        self._ref = ref
        self._curve = curve
        self._watcher = watcher
        self._lives = 0
        self._context = zmq.Context()
        try:
            self._open()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            msg = f"cannot connect to {endpoint!r}: {error}"
            raise ValueError(msg) from None

    def _open(self) -> None:
        self._lives += 1
        self.state = LinkState.CONNECTING
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{self._ref.id}.{self._ref.incarnation:x}.{self._lives}".encode())
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)
        if self._curve is not None:
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = self._curve
        self._monitor = socket.get_monitor_socket(_EVENTS)
        socket.connect(self.endpoint)
        self._poller = zmq.Poller()
        for each in (socket, self._monitor):
            self._poller.register(each, zmq.POLLIN)
            if self._watcher is not None:
                self._watcher.add(each.FD)

    def _drop(self, linger_ms: int) -> None:
        if self._watcher is not None:
            for each in (self._socket, self._monitor):
                self._watcher.remove(each.FD)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def wait(self, seconds: float) -> None:
        """Sleep until something has arrived or `seconds` have passed."""
        self._poller.poll(max(0, round(seconds * 1000)))

    def send(self, parts: list[bytes]) -> bool:
        """Send unless the socket is full or not connected; returns whether it was sent."""
        if self.state is not LinkState.UP:
            return False
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[list[bytes]]:
        """Yield the messages that have arrived."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield parts

    @property
    def pending(self) -> bool:
        """Whether there is something to receive or to check."""
        return bool(self._poller.poll(0))

    def check(self) -> bool:
        """Look at what has happened to the connection; returns whether it was up and is lost."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = LinkState.UP
            elif event & _FAILED:
                self.state = LinkState.REFUSED
            elif self.state is LinkState.UP:
                return True
        return False

    def renew(self) -> None:
        """Give the connection up, with all that is queued on it, and begin another."""
        self._drop(linger_ms=0)
        self._open()

    def close(self) -> None:
        """Close; waits at most LINGER_MS for what is still to be sent."""
        if self.state is LinkState.CLOSED:
            return
        self.state = LinkState.CLOSED
        self._drop(LINGER_MS)
        self._context.term()


_OPTIONS: dict[int, int] = {
    zmq.SNDHWM: HIGH_WATER,
    zmq.RCVHWM: HIGH_WATER,
    # IMMEDIATE stays off: with it libzmq drops what has arrived and was not read yet when the peer goes.
    zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
    zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
    zmq.RECONNECT_IVL: RECONNECT_MS,
    zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
}
