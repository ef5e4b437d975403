"""What tells one set of weights from another without reading gigabytes."""

import hashlib
import json
import struct
from pathlib import Path

from kvferry_engine.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAMPLES = 64
SAMPLE_BYTES = 256
MAX_HEADER_BYTES = 100_000_000


def weight_files(folder: Path) -> list[Path]:
    """Safetensors files of a model folder, in a fixed order; raises ModelError when there are none or one is absent."""
    index = folder / INDEX
    if index.is_file():
        names = _indexed_names(index)
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        msg = f"{folder} has no weights: neither {SINGLE} nor {INDEX}"
        raise ModelError(msg)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        msg = f"{folder} lacks {', '.join(missing)}, which its index names"
        raise ModelError(msg)
    return [folder / name for name in names]


def _indexed_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{index} is not a safetensors index: {error!r}"
        raise ModelError(msg) from error
    # An index comes from strangers: it may name files of its own folder alone.
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        msg = f"{index} names files outside its folder: {outside}"
        raise ModelError(msg)
    return names


def weights_identity(folder: Path) -> str:
    """Hash over the weight files' sizes, safetensors headers and evenly spaced samples of their data.

    The header alone would not tell two fine-tunes of one model apart: they have the same names, shapes and offsets.
    """
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            header = _header_bytes(path, file.read(8), size)
            digest.update(file.read(header))
            for sample in range(SAMPLES):
                file.seek(8 + header + sample * (size - 8 - header) // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    header: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if header > min(size - 8, MAX_HEADER_BYTES):
        msg = f"{path} is not a safetensors file, or was cut short"
        raise ModelError(msg)
    return header
