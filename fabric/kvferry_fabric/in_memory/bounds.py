"""The check that a schedule passes before anything of it is posted: the rule of fabric/csrc/schedule.c."""

from dataclasses import dataclass

import numpy as np
from kvferry_proto.immediate import MAX_GENERATIONS, MAX_PAGES_PER_WRITE, MAX_SLOTS

from kvferry_fabric.errors import OutOfBoundsError
from kvferry_fabric.runs import Runs
from kvferry_fabric.schedule import ChunkSchedule

_ERANGE = 34
_NUMBERS = (
    "first_value",
    "source_layer_stride",
    "destination_layer_stride",
    "source_page_stride",
    "destination_page_stride",
    "source_offset",
    "destination_offset",
    "source_start",
    "destination_start",
    "length",
)


@dataclass(frozen=True)
class Side:
    """Where pages lie at one end of a schedule. Bytes."""

    name: str
    start: int
    layer_stride: int
    page_stride: int
    offset: int
    room: int

    def place(self, layer: int, page: int) -> int:
        """Offset of a page's piece in its region."""
        return self.start + layer * self.layer_stride + page * self.page_stride + self.offset


def sides(chunk: ChunkSchedule, room: int) -> tuple[Side, Side]:
    """Both ends of a schedule; `room` is the length of its local region."""
    return (
        Side(
            "source", chunk.source_start, chunk.source_layer_stride, chunk.source_page_stride,
            chunk.source_offset, room,
        ),
        Side(
            "destination", chunk.destination_start, chunk.destination_layer_stride, chunk.destination_page_stride,
            chunk.destination_offset, chunk.remote.length,
        ),
    )  # fmt: skip


def check(chunk: ChunkSchedule, room: int) -> Runs:
    """Return the schedule's runs, int32 [n, 3]. Raises OutOfBoundsError if a page leaves either region."""
    _check_fields(chunk)
    runs = np.ascontiguousarray(chunk.runs, dtype=np.int32).reshape(-1, 3)
    for column, side in enumerate(sides(chunk, room)):
        if side.offset + chunk.length > side.page_stride:
            _refuse(f"piece of {chunk.length} bytes at offset {side.offset} leaves its {side.name} page")
        for number, run in enumerate(runs.tolist()):
            _check_run(chunk, side, number, run[column], run[2])
    return runs


def check_immediate(slot: int, generation: int, pages: int) -> Runs:
    """Return the one run of a write of no bytes, int32 [1, 3]. Raises OutOfBoundsError if its immediate can't be."""
    if not 0 <= pages <= MAX_PAGES_PER_WRITE:
        _refuse(f"an immediate counts 0 to {MAX_PAGES_PER_WRITE} pages, not {pages}")
    _check_slot(slot, generation)
    return np.array([[0, 0, pages]], np.int32)


def _check_fields(chunk: ChunkSchedule) -> None:
    for name in _NUMBERS:
        if not 0 <= getattr(chunk, name) < 1 << 64:
            _refuse(f"a transfer's numbers must not be negative and fit 64 bits: {name} is {getattr(chunk, name)}")
    if chunk.layers < 1 or chunk.length < 1:
        _refuse("a transfer needs at least one layer, and a piece that is not empty")
    _check_slot(chunk.slot, chunk.generation)


def _check_slot(slot: int, generation: int) -> None:
    if not 0 <= slot < MAX_SLOTS:
        _refuse(f"slot {slot} is not below {MAX_SLOTS}")
    if not 0 <= generation < MAX_GENERATIONS:
        _refuse(f"generation {generation} is not below {MAX_GENERATIONS}")


def _check_run(chunk: ChunkSchedule, side: Side, number: int, first: int, count: int) -> None:
    if count < 1:
        _refuse(f"run {number} has {count} pages")
    if first < 0:
        _refuse(f"run {number} starts at {side.name} page {first}")
    last = first + count - 1
    if side.place(chunk.layers - 1, last) + chunk.length > side.room:
        _refuse(f"run {number} ({side.name} pages {first}..{last}) is out of bounds: the region has {side.room} bytes")
    into_next = side.layer_stride >= side.page_stride and (last + 1) * side.page_stride > side.layer_stride
    if chunk.layers > 1 and into_next:
        _refuse(f"run {number} ({side.name} pages {first}..{last}) is out of bounds: it leaves its layer")


def _refuse(text: str) -> None:
    raise OutOfBoundsError(text, _ERANGE)
