"""Somebody on the network who speaks to a cluster's sockets as they like."""

import json

import orjson
import redis
import zmq
from kvferry_proto.codec import encode
from kvferry_proto.nodes import NodeRecord, NodeRef, new_incarnation

WAIT_MS = 60_000


def record_of(cluster, name):
    """What a node has published about itself."""
    import msgspec

    with redis.Redis.from_url(cluster.redis_url) as client:
        return msgspec.json.decode(client.hget(f"kvferry:node:{name}", "record"), type=NodeRecord)


class Stranger:
    """A DEALER socket to one node. Use as a context manager."""

    def __init__(self, cluster, name, node_id="stranger", ref=None):
        """`ref` is whom it claims to be, if not a node that nobody knows."""
        self.record = record_of(cluster, name)
        self.ref = ref or NodeRef(node_id, new_incarnation())
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        self._socket.rcvhwm = 0
        self._socket.connect(self.record.endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def parts(self, *parts):
        """Send a multipart as it is."""
        self._socket.send_multipart(parts)

    def say(self, message, to=0):
        """Send a message of the protocol."""
        self._socket.send_multipart(encode(self.ref, message, to))

    def header(self, body, frames=(), **envelope):
        """Send a header of any content, with frames."""
        head = {"sender": {"id": self.ref.id, "incarnation": self.ref.incarnation}, "body": body} | envelope
        self._socket.send_multipart([orjson.dumps(head), *frames])

    def hear(self, wait_ms=WAIT_MS):
        """Return the body of the next answer; fails after `wait_ms`."""
        assert self._socket.poll(wait_ms), "no answer"
        return json.loads(self._socket.recv_multipart()[0])["body"]

    def hear_until(self, *kinds):
        """Return the first answer of one of these types."""
        while (body := self.hear())["type"] not in kinds:
            pass
        return body

    def nothing_heard(self, wait_ms=300):
        """Whether nothing comes."""
        return not self._socket.poll(wait_ms)


class Impostor:
    """A ROUTER socket that poses as a node. Use as a context manager."""

    def __init__(self, node_id="impostor", ref=None):
        """`ref` is whom it claims to be, if not a node that nobody knows."""
        self.ref = ref or NodeRef(node_id, new_incarnation())
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._caller = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def hear(self, wait_ms=WAIT_MS):
        """Return header and frames of the next message."""
        assert self._socket.poll(wait_ms), "nobody called"
        self._caller, header, *frames = self._socket.recv_multipart()
        return json.loads(header), frames

    def say(self, message, to=0):
        """Answer whoever called last."""
        self._socket.send_multipart([self._caller, *encode(self.ref, message, to)])

    def parts(self, *parts):
        """Answer whoever called last with a multipart as it is."""
        self._socket.send_multipart([self._caller, *parts])
