"""Messages on the wire: a multipart of one JSON header and the int32 frames that it refers to.

The header is an `Envelope`: who sends, for which incarnation it is meant, and the message. An `Int32s` field of the
message stands in the header as [frame number, length] and its values follow in that frame, so that 30,000 token ids
cost a memory copy and not 30,000 JSON numbers. orjson parses (a bounded parser: no recursion bombs), msgspec checks
types; whatever does not fit raises `WireError` with a reason that can be counted.
"""

from typing import Any, Generic, TypeVar

import msgspec
import orjson

from kvferry_proto.ints import Int32s
from kvferry_proto.nodes import NodeRef

# 1 MiB of header holds the largest chat that a 128k-token model takes as text; a frame of 4 MiB a million token ids.
MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 4 << 20
MAX_FRAMES = 4

T = TypeVar("T")


class Envelope(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Header of every message."""

    sender: NodeRef
    to: int = 0
    """Incarnation that the message is meant for; 0 where the sender can't know one. A node that has restarted since
    refuses what was meant for its predecessor."""
    body: T


class WireError(ValueError):
    """A multipart that is no message. `reason` is one of a small set of words, fit for a metric's label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def encode(sender: NodeRef, body: msgspec.Struct, to: int = 0) -> list[bytes]:
    """Return the parts to send.

    Raises WireError: reason "size" if the message is larger than a receiver would take, "json" for text that is no
    Unicode or a number beyond 64 bits.
    """
    frames: list[bytes] = []

    def reference(value: object) -> list[int]:
        if not isinstance(value, Int32s):
            msg = f"cannot put a {type(value).__name__} on the wire"
            raise TypeError(msg)
        frames.append(value.to_frame())
        return [len(frames) - 1, len(value)]

    content = msgspec.to_builtins(Envelope(sender=sender, to=to, body=body), enc_hook=reference)
    try:
        header = orjson.dumps(content)
    except orjson.JSONEncodeError as error:
        raise WireError("json", f"a {type(body).__name__} cannot be written as JSON: {error}") from None
    parts = [header, *frames]
    _check_sizes(parts)
    return parts


def decode(parts: list[bytes], kind: Any) -> Envelope[Any]:  # noqa: ANN401  # a union of message types
    """Parse and validate `parts` as an envelope around one of the message types of the union `kind`.

    Raises WireError: reason "size", "json" or "type".
    """
    _check_sizes(parts)
    frames = parts[1:]
    used: set[int] = set()

    def resolve(kind: type, value: object) -> Int32s:
        if kind is not Int32s:
            raise NotImplementedError(kind)
        index, length = _reference(value)
        if index >= len(frames) or index in used:
            msg = f"frame {index} is missing or used twice: the message has {len(frames)}"
            raise ValueError(msg)
        if len(frames[index]) != 4 * length:
            msg = f"frame {index} has {len(frames[index])} bytes, expected {4 * length} for {length} numbers"
            raise ValueError(msg)
        used.add(index)
        return Int32s.from_frame(frames[index])

    try:
        header = orjson.loads(parts[0])
    except orjson.JSONDecodeError as error:
        raise WireError("json", f"the header is not JSON: {error}") from None
    try:
        envelope: Envelope[Any] = msgspec.convert(header, Envelope[kind], dec_hook=resolve)
    except (msgspec.ValidationError, ValueError) as error:
        raise WireError("type", str(error)) from None
    if len(used) != len(frames):
        raise WireError("type", f"{len(frames)} frames came, the header refers to {len(used)}")
    return envelope


def _reference(value: object) -> tuple[int, int]:
    match value:
        # JSON's true is an int to Python, and no number to us.
        case [int(index), int(length)] if bool not in (type(index), type(length)) and index >= 0 and length >= 0:
            return index, length
    msg = "expected [frame number, length] in place of an integer array"
    raise ValueError(msg)


def _check_sizes(parts: list[bytes]) -> None:
    if not parts or len(parts) > 1 + MAX_FRAMES:
        raise WireError("size", f"a message has 1 to {1 + MAX_FRAMES} parts, this one {len(parts)}")
    if len(parts[0]) > MAX_HEADER_BYTES:
        raise WireError("size", f"the header has {len(parts[0])} bytes, at most {MAX_HEADER_BYTES} are taken")
    for index, frame in enumerate(parts[1:]):
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError("size", f"frame {index} has {len(frame)} bytes, at most {MAX_FRAME_BYTES} are taken")
