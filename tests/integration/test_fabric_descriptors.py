"""Memory descriptors of strangers: what is no descriptor is refused as it is read, and the rest before a byte moves."""

import fabric_rig as rig
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_fabric import FabricError, TransferEngine
from kvferry_proto.memory import MemoryDescriptor

HEX = st.text("0123456789abcdefABCDEFxyz \0", max_size=40)
NUMBER = st.one_of(st.integers(-2, 600), st.integers(-(1 << 70), 1 << 70), st.sampled_from([1 << 63, (1 << 64) - 1]))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBER, st.floats(allow_nan=False), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
FIELDS = ("provider", "length", "incarnation", "domains")
DOMAIN_FIELDS = ("address", "base", "key")


@pytest.fixture(scope="module")
def pair():
    with TransferEngine("tcp", incarnation=2) as other:
        made = rig.Pair("tcp", layers=1, pages=4, page=64)
        made.stranger = other.register(memoryview(bytearray(256))).descriptor
        yield made
        made.close()


def mangled(data, whole: MemoryDescriptor):
    """A descriptor as plain data, with a few of its parts replaced, removed or repeated."""
    plain = msgspec.to_builtins(whole)
    for name in data.draw(st.sets(st.sampled_from(FIELDS), max_size=2)):
        plain[name] = data.draw(NUMBER if name in {"length", "incarnation"} and data.draw(st.booleans()) else ANYTHING)
    if isinstance(plain["domains"], tuple | list):
        domains = [dict(one) for one in plain["domains"] if isinstance(one, dict)] * data.draw(st.integers(0, 9))
        for one in domains[:2]:
            for name in data.draw(st.sets(st.sampled_from(DOMAIN_FIELDS), max_size=2)):
                one[name] = data.draw(st.one_of(HEX, NUMBER, ANYTHING))
        plain["domains"] = domains if data.draw(st.booleans()) else plain["domains"]
    return plain


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mangled_descriptor_moves_nothing_where_it_should_not(pair, data) -> None:
    whole = data.draw(st.sampled_from([pair.remote.descriptor, pair.stranger]))
    raw = msgspec.json.encode(mangled(data, whole))
    try:
        descriptor = msgspec.json.decode(raw, type=MemoryDescriptor)
    except msgspec.ValidationError:
        return
    try:
        with pair.sender.connect(descriptor.addresses) as peer:
            page = np.array([3])
            chunk = pair.chunk(page, page, remote=descriptor, peer=peer, first_value=1 << 40)
            pair.sender.schedule_layers(chunk).cancel()
    except FabricError:
        return
    assert rig.end_of(pair.sender).pages == 0
    assert 0 <= descriptor.length < 1 << 64
    assert descriptor.length >= 4 * 64, "page 3 lies beyond the region that was described"


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=200))
def test_bytes_that_are_no_descriptor_are_refused(raw) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(raw, type=MemoryDescriptor)
