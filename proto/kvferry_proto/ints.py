"""Arrays of 32-bit integers: token ids and page tables, carried as raw little-endian frames beside the header."""

import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self, cast

if TYPE_CHECKING:
    IntArray = array[int]
else:
    # array takes no type parameter at run time before Python 3.12.
    IntArray = array

_BIG_ENDIAN = sys.byteorder == "big"


class Int32s(IntArray):
    """An `array('i')` that the codec sends as a frame of its own. numpy views it without a copy."""

    def __new__(cls, values: Iterable[int] = ()) -> Self:
        """Copy `values`. Raises OverflowError for one that does not fit in 32 bits, TypeError for a non-integer."""
        return cast("Self", super().__new__(cls, "i", values))

    @classmethod
    def from_frame(cls, frame: bytes | memoryview) -> Self:
        """Read a little-endian frame. Raises ValueError if its length is not a multiple of 4 bytes."""
        values = cls()
        values.frombytes(frame)
        if _BIG_ENDIAN:
            values.byteswap()
        return values

    def to_frame(self) -> bytes:
        """Little-endian bytes."""
        if not _BIG_ENDIAN:
            return self.tobytes()
        swapped = Int32s(self)
        swapped.byteswap()
        return swapped.tobytes()
