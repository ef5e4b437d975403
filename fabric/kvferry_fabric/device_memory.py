"""Memory that a GPU alone reads and writes, as it is registered with an engine that was opened for it."""

from typing import NamedTuple


class DeviceRange(NamedTuple):
    """A run of bytes of a GPU."""

    pointer: int
    """Where the GPU finds it."""
    length: int
    """Bytes."""
    device: int
    """Number of the GPU, as CUDA counts."""
    dma_buf: int | None = None
    """A file descriptor of it whose first byte is at `pointer`; stays its owner's."""
    owner: object = None
    """Kept alive as long as the registration."""
