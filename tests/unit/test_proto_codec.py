"""The codec: what goes out comes back, and whatever else comes in is a WireError with a countable reason."""

import copy
import json
import typing
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_proto.codec import MAX_FRAME_BYTES, MAX_FRAMES, MAX_HEADER_BYTES, WireError, decode, encode
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.memory import DomainMemory, LocalMemory, MemoryDescriptor
from kvferry_proto.message import Message, Refused, RequestFailed
from kvferry_proto.nodes import NodeRef, new_incarnation
from kvferry_proto.timeline import PrefillTimeline
from kvferry_proto.to_client import ToClient
from kvferry_proto.to_decoder import Assign, PrefillReport, ToDecoder
from kvferry_proto.to_prefiller import Prefill, ToPrefiller
from kvferry_proto.to_router import Generate, TokenRun, Tokens, ToRouter

EVERYTHING = ToRouter | ToDecoder | ToPrefiller | ToClient
REASONS = {"size", "json", "type"}

int32 = st.integers(-(2**31), 2**31 - 1)
ints = st.lists(int32, max_size=40).map(Int32s)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=128)
refs = st.builds(NodeRef, names, st.integers(0, 2**53))
layouts = st.builds(
    KVLayout,
    model=names,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    layers=st.integers(1, 99),
    kv_heads=st.just(8),
    head_dim=st.integers(1, 512),
    page_size=st.integers(1, 256),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
)
domain_memory = st.builds(
    DomainMemory,
    address=st.text("0123456789abcdef", max_size=64),
    base=st.integers(0, 2**64 - 1),
    key=st.integers(0, 2**64 - 1),
)
memory = st.builds(
    MemoryDescriptor,
    provider=names,
    length=st.integers(0, 2**48),
    incarnation=st.integers(0, 2**53),
    domains=st.lists(domain_memory, min_size=1, max_size=8).map(tuple),
    local=st.none() | st.builds(LocalMemory, seat=names, key=st.integers(0, 2**64 - 1)),
)
messages = st.one_of(
    st.builds(Generate, id=names, prompt_ids=st.none() | ints, prompt=st.none() | names),
    st.builds(
        Prefill,
        request_id=names,
        tokens=ints,
        pages=ints,
        slot=st.integers(0, 1023),
        generation=st.integers(0, 1023),
        layout=layouts,
        memory=st.lists(memory, max_size=3),
    ),
    st.builds(Tokens, runs=st.lists(st.builds(TokenRun, names, st.integers(0, 9)), max_size=3), token_ids=ints),
    st.builds(
        PrefillReport,
        request_id=names,
        slot=st.integers(0, 9),
        generation=st.integers(0, 9),
        timeline=st.builds(PrefillTimeline, received=st.integers(0, 2**62)),
        checksums=ints,
    ),
    st.builds(
        RequestFailed,
        request_id=names,
        error=st.builds(
            RequestError, code=st.sampled_from(ErrorCode), message=st.text(), phase=st.sampled_from(Phase)
        ).filter(lambda error: not any(0xD800 <= ord(letter) < 0xE000 for letter in error.message)),
    ),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**65) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def refused(parts: list[bytes], kind: Any = EVERYTHING) -> str | None:
    """Return the reason of a refusal; None if the parts are a message after all. Anything else raised fails."""
    try:
        decode(parts, kind)
    except WireError as error:
        reason = error.reason
    else:
        return None
    assert reason in REASONS
    return reason


@given(refs, messages, st.integers(0, 2**53))
def test_round_trip(sender, message, to):
    envelope = decode(encode(sender, message, to), EVERYTHING)
    assert (envelope.sender, envelope.to) == (sender, to)
    assert envelope.body == message
    assert type(envelope.body) is type(message)


@given(messages)
def test_arrays_travel_as_frames_of_little_endian_numbers(message):
    parts = encode(NodeRef("a", 1), message)
    for value in (getattr(message, field) for field in message.__struct_fields__):
        if isinstance(value, Int32s):
            assert b"".join(number.to_bytes(4, "little", signed=True) for number in value) in parts[1:]


@given(st.lists(st.binary(max_size=60), max_size=MAX_FRAMES + 3))
def test_noise_is_refused(parts):
    assert refused(parts) is not None


@given(json_values)
def test_json_of_any_shape_is_refused(value):
    assert refused([json.dumps(value).encode("utf-8", "surrogatepass")]) is not None


@settings(max_examples=300)
@given(messages, st.data())
def test_a_message_with_one_value_replaced_is_refused_or_a_message(message, data):
    parts = encode(NodeRef("a", 1), message)
    header = orjson.loads(parts[0])
    target, key = data.draw(st.sampled_from(list(_places(header))))
    target[key] = data.draw(json_values)
    refused([json.dumps(header).encode("utf-8", "surrogatepass"), *parts[1:]])


def _places(value: Any) -> typing.Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


@given(messages, st.data())
def test_torn_and_shuffled_frames_are_refused(message, data):
    parts = encode(NodeRef("a", 1), message)
    assert refused([*parts, b""]) is not None
    if len(parts) > 1:
        assert refused(parts[:-1]) is not None
        index = data.draw(st.integers(1, len(parts) - 1))
        torn = copy.copy(parts)
        torn[index] += data.draw(st.binary(min_size=1, max_size=9))
        assert refused(torn) == "type"


@pytest.mark.parametrize(
    "reference", [[0, True], [False, 1], [0, -1], [-1, 1], [0], [0, 1, 2], [0.0, 1], "x", None, {}, 7]
)
def test_frame_reference_of_the_wrong_form_is_refused(reference):
    body = {"type": "Delta", "id": "a", "text": "", "token_ids": reference}
    assert refused([orjson.dumps({"sender": ["a", 1], "body": body}), b"\0\0\0\0"]) == "type"
    assert refused([orjson.dumps({"sender": {"id": "a", "incarnation": 1}, "body": body}), b"\0\0\0\0"]) == "type"


def test_frame_used_twice_is_refused():
    parts = encode(NodeRef("a", 1), Assign(request_id="r", tokens=Int32s([1]), page_table=Int32s([2]), **_assign()))
    header = orjson.loads(parts[0])
    header["body"]["page_table"] = header["body"]["tokens"]
    assert refused([orjson.dumps(header), parts[1]]) == "type"


def _assign() -> dict[str, Any]:
    from kvferry_proto.sampling import SamplingParams

    return {"sampling": SamplingParams(), "stop_token_ids": []}


def test_nesting_bomb_is_refused():
    for depth in (10, 1000, 100_000):
        assert refused([b"[" * depth + b"]" * depth]) in {"json", "type"}
        assert refused([b'{"body":' * depth + b"1" + b"}" * depth]) in {"json", "type"}


def test_sizes_are_bounded_on_both_sides():
    assert refused([]) == "size"
    assert refused([b"{}"] * (MAX_FRAMES + 2)) == "size"
    assert refused([b" " * (MAX_HEADER_BYTES + 1)]) == "size"
    assert refused([b"{}", bytes(MAX_FRAME_BYTES + 4)]) == "size"
    with pytest.raises(WireError, match="header has"):
        encode(NodeRef("a", 1), Refused(reason="x", detail="y" * MAX_HEADER_BYTES))
    with pytest.raises(WireError, match="frame 0 has"):
        encode(NodeRef("a", 1), Tokens(runs=[], token_ids=Int32s(range(MAX_FRAME_BYTES // 4 + 1))))
    largest = Tokens(runs=[], token_ids=Int32s(range(MAX_FRAME_BYTES // 4)))
    assert decode(encode(NodeRef("a", 1), largest), EVERYTHING).body == largest


def test_text_that_is_no_unicode_is_refused_at_the_sender():
    with pytest.raises(WireError, match="json"):
        encode(NodeRef("a", 1), Refused(reason="x", detail="\ud800"))


def test_number_beyond_64_bits_is_refused_at_the_sender():
    with pytest.raises(WireError, match="json"):
        encode(NodeRef("a", 2**64), Refused(reason="x", detail=""))


def test_a_receiver_takes_only_its_own_messages():
    parts = encode(NodeRef("a", 1), Refused(reason="x", detail="y"))
    assert refused(parts, ToPrefiller) == "type"
    assert refused(parts, ToRouter) is None


def test_two_messages_never_share_their_arrays():
    first = PrefillReport(request_id="r", slot=0, generation=0, timeline=PrefillTimeline())
    second = PrefillReport(request_id="r", slot=0, generation=0, timeline=PrefillTimeline())
    first.checksums.append(1)
    first.timeline.chunks.append(None)  # type: ignore[arg-type]
    assert second.checksums == Int32s()
    assert second.timeline.chunks == []


def test_every_message_type_has_a_name_of_its_own():
    kinds = typing.get_args(EVERYTHING)
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    assert all(issubclass(kind, Message) for kind in kinds)
    assert {kind.__struct_config__.tag for kind in kinds} == {kind.__name__ for kind in kinds}
    assert isinstance(msgspec.structs.fields(Refused), tuple)


def test_incarnations_survive_json_and_lua():
    drawn = {new_incarnation() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(0 < number < 2**53 and float(number) == number for number in drawn)


@given(st.lists(int32))
def test_int32s_round_trip(values):
    assert list(Int32s.from_frame(Int32s(values).to_frame())) == values


@given(st.binary())
def test_frames_of_any_length(frame):
    if len(frame) % 4:
        with pytest.raises(ValueError, match="multiple"):
            Int32s.from_frame(frame)
    else:
        assert Int32s.from_frame(frame).to_frame() == frame


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_int32s_hold_no_more_than_32_bits(value):
    with pytest.raises(OverflowError):
        Int32s([value])
