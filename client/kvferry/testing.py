"""A router that answers as a script says: for tests of code that uses the client, with no cluster behind it."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import zmq
from kvferry_proto.codec import decode, encode
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Message
from kvferry_proto.nodes import NodeRef, new_incarnation
from kvferry_proto.timeline import Timeline
from kvferry_proto.to_client import Completed, Delta
from kvferry_proto.to_router import FromClient, Generate
from kvferry_proto.usage import FinishReason, Usage

POLL_MS = 5
WAIT_SECONDS = 10.0

M = TypeVar("M", bound=Message)


class Reply:
    """The way back to one client; may be kept, and used from any thread."""

    def __init__(self, router: "ScriptedRouter", identity: bytes) -> None:
        self._router = router
        self._identity = identity

    def send(self, message: Message) -> None:
        """Send a message to the client."""
        self.send_raw(encode(self._router.ref, message))

    def send_raw(self, parts: list[bytes]) -> None:
        """Send anything at all."""
        self._router.outbox.put([self._identity, *parts])

    def complete(self, request_id: str, pieces: list[str]) -> None:
        """Answer in the pieces given, one token each, numbered from 0."""
        for number, text in enumerate(pieces):
            self.send(Delta(id=request_id, text=text, token_ids=Int32s([number])))
        self.send(completed(request_id, len(pieces)))


Script = Callable[[Generate, Reply], None]


def completed(request_id: str, tokens: int) -> Completed:
    """Build the end of an answer of `tokens` tokens."""
    return Completed(
        id=request_id,
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=tokens),
        timeline=Timeline(),
        model="scripted",
    )


def echo(request: Generate, reply: Reply) -> None:
    """Answer with the words of the prompt: the script that a router has by default."""
    reply.complete(request.id, (request.prompt or "").split())


class ScriptedRouter:
    """Binds a real ROUTER socket and calls `script` for every Generate, in a thread of its own."""

    def __init__(self, script: Script = echo, endpoint: str = "tcp://127.0.0.1:*") -> None:
        """Bind. Raises zmq.ZMQError if the endpoint is taken."""
        self.ref = NodeRef("scripted-router", new_incarnation())
        self.outbox: queue.Queue[list[bytes]] = queue.Queue()
        self._received: queue.Queue[Message] = queue.Queue()
        self._script = script
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="scripted-router")
        self._thread.start()

    def expect(self, kind: type[M], seconds: float = WAIT_SECONDS) -> M:
        """Return the next message that came in. Raises AssertionError if it is of another kind, or none comes."""
        try:
            message = self._received.get(timeout=seconds)
        except queue.Empty:
            msg = f"no {kind.__name__} within {seconds} s"
            raise AssertionError(msg) from None
        if not isinstance(message, kind):
            msg = f"expected a {kind.__name__}, got {message!r}"
            raise AssertionError(msg)  # a failed expectation of a test
        return message

    def close(self) -> None:
        """Stop at once: clients see their connection break."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                self._send_all()
                if self._socket.poll(POLL_MS):
                    self._take(self._socket.recv_multipart())
        finally:
            self._socket.close()
            self._context.term()

    def _send_all(self) -> None:
        while not self.outbox.empty():
            self._socket.send_multipart(self.outbox.get())

    def _take(self, parts: list[bytes]) -> None:
        message = decode(parts[1:], FromClient).body
        self._received.put(message)
        if isinstance(message, Generate):
            self._script(message, Reply(self, parts[0]))
