"""How messages leave and enter a node: one bound inbox, and a channel to each peer that it talks to.

All of it belongs to the thread of the event loop. Sending never waits: a full queue is an exception at once.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from kvferry_proto.codec import encode
from kvferry_proto.nodes import NodeRef, Peer

from kvferry_node.addresses import authority, published
from kvferry_node.errors import BindError, PeerGone, QueueFull
from kvferry_node.metrics import NodeMetrics
from kvferry_node.reception import Handler, Origin, Reception
from kvferry_node.sockets import Curve, Pump, Returns, bound_endpoint, open_dealer, open_router

__all__ = ["Channel", "Curve", "Handler", "Inbox", "Origin", "Post"]

# Over all channels of the process: two of them must never share a ZeroMQ identity.
_numbers = itertools.count()


class Inbox:
    """One bound ROUTER socket: what others send to this node. Read while `run` runs."""

    def __init__(  # noqa: PLR0917  # what a socket is made of
        self,
        ref: NodeRef,
        host: str,
        port: int,
        kind: Any,  # noqa: ANN401  # a union of message types
        handler: Handler,
        metrics: NodeMetrics,
        curve: Curve | None = None,
    ) -> None:
        """Bind to `host`:`port`, 0 for any port. Raises BindError."""
        self._reception = Reception(ref, kind, handler, metrics)
        self._ref = ref
        self._metrics = metrics
        self._pump: Pump | None = None
        self._closed = asyncio.Event()
        address = published(host)
        self._socket = open_router(curve)
        try:
            self._socket.bind(f"tcp://{authority(address, port or '*')}")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            msg = f"cannot bind to {authority(address, port)} (--host, --zmq-port): {error}"
            raise BindError(msg) from None
        self.endpoint: str = bound_endpoint(self._socket)
        """What peers connect to; published in Redis."""

    async def run(self) -> None:
        """Read and handle messages until `close`."""
        if self._closed.is_set():
            return
        self._pump = Pump(self._socket, self._take)
        try:
            await self._closed.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Unbind. Answers already queued still leave, for half a second at most."""
        if self._pump is not None:
            self._pump.stop()
            self._pump = None
        self._reception.close()
        self._socket.close()
        self._closed.set()

    def _take(self, parts: list[bytes]) -> None:
        identity, *rest = parts
        self._reception.take(rest, lambda sender: _Caller(self, identity, sender))

    def send(self, identity: bytes, to: NodeRef, message: msgspec.Struct) -> None:
        """Send to the connection `identity`. Raises PeerGone, QueueFull, WireError."""
        parts = encode(self._ref, message, to.incarnation)
        try:
            self._socket.send_multipart([identity, *parts], zmq.NOBLOCK)
        except zmq.Again:
            self._metrics.send_failures.labels("full").inc()
            msg = f"the queue to {to} is full"
            raise QueueFull(msg) from None
        except zmq.ZMQError as error:
            self._metrics.send_failures.labels("gone").inc()
            msg = f"{to} is no longer connected ({error})"
            raise PeerGone(msg) from None
        self._metrics.messages.labels(type(message).__name__, "out").inc()
        if self._pump is not None:
            self._pump.kick()


class _Caller:
    """Origin of a message at the inbox."""

    __slots__ = ("_inbox", "key", "sender")
    peer = None

    def __init__(self, inbox: Inbox, identity: bytes, sender: NodeRef) -> None:
        self._inbox = inbox
        self.key = identity
        self.sender = sender

    def reply(self, message: msgspec.Struct) -> None:
        self._inbox.send(self.key, self.sender, message)


class Channel:
    """One DEALER socket to one life of a peer; messages carry its incarnation, so that a successor refuses them."""

    def __init__(
        self,
        ref: NodeRef,
        peer: Peer,
        reception: Reception,
        curve: Curve | None,
        on_return: Callable[[NodeRef], None] | None = None,
    ) -> None:
        """Connect, in the background: what is sent meanwhile is queued. Needs a running loop."""
        self.peer = peer
        self._ref = ref
        self._reception = reception
        self._metrics = reception.metrics
        self.identity = f"{ref.id}.{ref.incarnation:x}.{next(_numbers)}".encode()
        self._socket = open_dealer(self.identity, curve)
        try:
            self._socket.connect(peer.endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            msg = f"{peer.ref} has published an endpoint that can't be connected to, {peer.endpoint!r}: {error}"
            raise PeerGone(msg) from None
        self._pump = Pump(self._socket, self._take)
        self._returns = None if on_return is None else Returns(self._socket, lambda: on_return(peer.ref))

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message to the peer, in order after those before it.

        Raises QueueFull at the high-water mark, PeerGone after `close`, WireError for a message too large to be taken.
        """
        parts = encode(self._ref, message, self.peer.ref.incarnation)
        if self._socket.closed:
            self._metrics.send_failures.labels("gone").inc()
            msg = f"the channel to {self.peer.ref} is closed"
            raise PeerGone(msg)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            self._metrics.send_failures.labels("full").inc()
            msg = f"the queue to {self.peer.ref} is full"
            raise QueueFull(msg) from None
        self._metrics.messages.labels(type(message).__name__, "out").inc()
        self._pump.kick()

    def close(self) -> None:
        """Disconnect. What is queued still leaves, for half a second at most."""
        if not self._socket.closed:
            self._pump.stop()
            if self._returns is not None:
                self._returns.close()
            self._socket.close()

    def _take(self, parts: list[bytes]) -> None:
        if self._returns is not None:
            self._returns.look()
        self._reception.take(parts, lambda sender: _Answerer(self, sender), self.peer.ref)


class _Answerer:
    """Origin of a message that came back on a channel."""

    __slots__ = ("_channel", "sender")

    def __init__(self, channel: Channel, sender: NodeRef) -> None:
        self._channel = channel
        self.sender = sender

    @property
    def peer(self) -> Peer:
        return self._channel.peer

    @property
    def key(self) -> bytes:
        return self._channel.identity

    def reply(self, message: msgspec.Struct) -> None:
        self._channel.send(message)


class Post:
    """All outgoing channels of a node, one per life of a peer."""

    def __init__(
        self,
        ref: NodeRef,
        kind: Any,  # noqa: ANN401  # the union of messages that come back
        handler: Handler,
        metrics: NodeMetrics,
        curve: Curve | None = None,
        *,
        on_return: Callable[[NodeRef], None] | None = None,
    ) -> None:
        """`on_return` is told whose connection is there again after a break, in which messages may have been lost."""
        self._ref = ref
        self._reception = Reception(ref, kind, handler, metrics)
        self._metrics = metrics
        self._curve = curve
        self._on_return = on_return
        self._channels: dict[NodeRef, Channel] = {}

    def to(self, peer: Peer) -> Channel:
        """Return the channel to `peer`, opened on first use.

        A node that has restarted is another peer: whoever still has something to say to its earlier life does not cut
        off what comes from this one. Raises PeerGone for an endpoint that makes no sense.
        """
        channel = self._channels.get(peer.ref)
        if channel is not None and channel.peer.endpoint == peer.endpoint:
            return channel
        self._drop(peer.ref)
        channel = Channel(self._ref, peer, self._reception, self._curve, self._on_return)
        self._channels[peer.ref] = channel
        self._metrics.channels.set(len(self._channels))
        return channel

    def forget(self, ref: NodeRef) -> None:
        """Close the channel to this life of a node: it is gone."""
        self._drop(ref)

    def close(self) -> None:
        """Close all channels."""
        for ref in list(self._channels):
            self._drop(ref)
        self._reception.close()

    def __len__(self) -> int:
        return len(self._channels)

    def _drop(self, ref: NodeRef) -> None:
        channel = self._channels.pop(ref, None)
        if channel is not None:
            channel.close()
        self._metrics.channels.set(len(self._channels))
