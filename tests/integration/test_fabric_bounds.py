"""Schedules that do not fit their regions are refused before anything is posted."""

from collections.abc import Iterator

import fabric_rig as rig
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvferry_fabric import FabricError, OutOfBoundsError, TransferEngine

LAYERS, PAGES, PAGE = 3, 8, 512


@pytest.fixture(scope="module")
def pair() -> Iterator["rig.Pair"]:
    made = rig.Pair("tcp", LAYERS, PAGES, PAGE)
    yield made
    made.close()


def table(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, np.int32)


@pytest.mark.parametrize(
    ("rows", "changes", "text"),
    [
        ([(0, 0, 1), (7, 0, 2)], {}, r"run 1 \(source pages 7..8"),
        ([(0, 7, 2)], {}, r"run 0 \(destination pages 7..8"),
        ([(-1, 0, 1)], {}, "run 0 starts at source page -1"),
        ([(0, -5, 1)], {}, "run 0 starts at destination page -5"),
        ([(0, 0, 0)], {}, "run 0 has 0 pages"),
        ([(0, 0, 2**31 - 1)], {}, "run 0"),
        ([(2**31 - 1, 0, 1)], {}, "run 0"),
        ([(0, 0, 1)], {"layers": LAYERS + 1}, "out of bounds"),
        ([(0, 0, 1)], {"layers": 0}, "at least one layer"),
        ([(0, 0, 1)], {"length": 0}, "empty"),
        ([(0, 0, 1)], {"source_offset": 1}, "leaves its source page"),
        ([(0, 0, 1)], {"destination_offset": 1}, "leaves its destination page"),
        ([(0, 0, 1)], {"slot": 1024}, "slot 1024"),
        ([(0, 0, 1)], {"generation": 1024}, "generation 1024"),
        ([(0, 0, 1)], {"source_layer_stride": 1 << 63}, "out of bounds"),
        ([(0, 0, 1)], {"source_page_stride": (1 << 64) - 1, "destination_page_stride": (1 << 64) - 1}, None),
        ([(3, 3, 1)], {"source_page_stride": (1 << 64) - 1}, "out of bounds"),
        ([(0, 0, 1)], {"destination_start": 1 << 64}, "fit 64 bits"),
        ([(0, 0, 1)], {"destination_start": -1}, "must not be negative"),
    ],
)
def test_out_of_bounds_schedules_are_refused_with_the_run_named(pair, rows, changes, text) -> None:
    chunk = pair.chunk(np.arange(1), np.arange(1), **{"runs": table(*rows), **changes})
    if text is None:  # strides beyond all memory are fine as long as only page 0 is named
        pair.sender.schedule_layers(chunk).cancel()
        rig.end_of(pair.sender)
        return
    before = pair.sender.stats()
    with pytest.raises(OutOfBoundsError, match=text):
        pair.sender.schedule_layers(chunk)
    assert pair.sender.stats()._replace(sleeps=0) == before._replace(sleeps=0)


FIELD = st.integers(0, 3 * PAGE)
ROW = st.tuples(st.integers(-1, PAGES + 1), st.integers(-1, PAGES + 1), st.integers(0, PAGES + 1))


def fits(rows, layers, length, *, start, stride, offset, room, column) -> bool:
    """The rule, page by page and byte by byte: inside the region, the page and the layer."""
    if length == 0 or offset + length > PAGE:
        return False
    for row in rows:
        if row[2] < 1 or row[column] < 0:
            return False
        for index in range(row[column], row[column] + row[2]):
            if start + (layers - 1) * stride + index * PAGE + offset + length > room:
                return False
            if layers > 1 and stride >= PAGE and (index + 1) * PAGE > stride:
                return False
    return True


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    rows=st.lists(ROW, min_size=1, max_size=4),
    layers=st.integers(1, LAYERS + 1),
    length=st.integers(0, PAGE + 1),
    starts=st.tuples(FIELD, FIELD),
    strides=st.tuples(*[st.sampled_from([0, PAGE // 2, PAGE, PAGES * PAGE])] * 2),
    offsets=st.tuples(*[st.integers(0, PAGE)] * 2),
    room=st.integers(0, LAYERS * PAGES * PAGE),
)
def test_exactly_the_schedules_that_fit_are_taken(  # noqa: PLR0917 - hypothesis fills them by name
    pair, rows, layers, length, starts, strides, offsets, room
) -> None:
    remote = msgspec.structs.replace(pair.remote.descriptor, length=room)
    chunk = pair.chunk(
        np.arange(1), np.arange(1), runs=table(*rows), layers=layers, length=length, remote=remote,
        source_start=starts[0], destination_start=starts[1], source_layer_stride=strides[0],
        destination_layer_stride=strides[1], source_offset=offsets[0], destination_offset=offsets[1],
        first_value=1 << 40,
    )  # fmt: skip
    rooms = (pair.source.nbytes, room)
    good = all(
        fits(rows, layers, length, start=start, stride=stride, offset=offset, room=size, column=column)
        for column, (start, stride, offset, size) in enumerate(zip(starts, strides, offsets, rooms, strict=True))
    )
    if not good:
        with pytest.raises(OutOfBoundsError):
            pair.sender.schedule_layers(chunk)
        return
    pair.sender.schedule_layers(chunk).cancel()
    assert rig.end_of(pair.sender).pages == 0


def test_a_descriptor_of_another_endpoint_is_refused(pair) -> None:
    other = pair.sender.register(memoryview(bytearray(64)))
    with pytest.raises(FabricError, match="cannot be written through"):
        pair.sender.schedule_layers(pair.chunk(np.arange(1), np.arange(1), remote=other.descriptor))
    other.close()


@pytest.mark.parametrize("address", ["zz", "", "00", "ff" * 300, "00" * 15])
def test_addresses_that_cannot_be_are_refused(pair, address) -> None:
    with pytest.raises(FabricError, match=r"not hexadecimal|not an address"):
        pair.sender.connect((address,))


@pytest.mark.parametrize("address", ["ff" * 16, "00" * 16, "01002f" + "00" * 13, "ff ff" + "00" * 14])
def test_an_address_of_another_family_is_not_the_last_that_is_taken(address) -> None:
    with TransferEngine("tcp", incarnation=1) as first, TransferEngine("tcp", incarnation=2) as other:
        with pytest.raises(FabricError, match="not an address"):
            first.connect((address,))
        first.connect(other.addresses).close()


def test_read_only_memory_is_refused(pair) -> None:
    with pytest.raises(BufferError):
        pair.sender.register(memoryview(b"read only"))


def test_an_engine_that_is_dropped_ends_its_thread():
    before = rig.Held()
    engine = TransferEngine("tcp", incarnation=1)
    engine.register(memoryview(bytearray(4096)))
    engine.cycle = engine
    assert len(before.left_over()[1]) == 1
    del engine
    assert before.left_over() == rig.NOTHING
