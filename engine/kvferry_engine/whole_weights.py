"""Whether the weight files of a model folder are whole: a download that was cut short looks like one that was not."""

import json
import struct
from pathlib import Path

from kvferry_engine.errors import ModelError
from kvferry_engine.identity import MAX_HEADER_BYTES, weight_files

PREFIX_BYTES = 8
"""The header's length stands before it."""


def check_whole(folder: Path) -> None:
    """Compare the sizes of the weight files with what their headers say. Reads nothing else of them.

    Raises ModelError, which names the files, and what they have and should have.
    """
    if faults := [fault for path in weight_files(folder) if (fault := _fault(path))]:
        raise ModelError("; ".join(faults))


def _fault(path: Path) -> str | None:
    try:
        size, wanted = path.stat().st_size, _wanted_bytes(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"{path} is not a safetensors file: {error}"
    if size == wanted:
        return None
    return f"{path} has {size} bytes and should have {wanted}"


def _wanted_bytes(path: Path) -> int | str:
    """What the header says, or as much as is left of it. Raises ValueError and its like where it is none."""
    with path.open("rb") as file:
        prefix = file.read(PREFIX_BYTES)
        if len(prefix) < PREFIX_BYTES:
            return f"more than {PREFIX_BYTES}"
        length: int = struct.unpack("<Q", prefix)[0]
        if length > MAX_HEADER_BYTES:
            msg = "it is a Git LFS pointer, and git lfs pull fetches it" if prefix == b"version " else "no header"
            raise ValueError(msg)
        header = file.read(length)
    if len(header) < length:
        return f"more than {PREFIX_BYTES + length}"
    tensors = (tensor for name, tensor in json.loads(header).items() if name != "__metadata__")
    return PREFIX_BYTES + length + max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
