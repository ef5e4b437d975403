"""The memory of a rank's KV cache: one page-aligned allocation that a transfer engine can register.

A GPU's pool lies in its own memory where the fabric can register that, and else in host memory that the GPU reads and
writes over its bus.

It is shared memory, so that another process of the host can register it, or write into it: a rank's process hands its
pool over with `pool.shared.send(connection)`, and at the other end `SharedMemory.receive(connection)`, or
`DeviceMemory.receive(connection, device)`, given to KVPool as its memory, is the same pool.
"""

from typing import Self, TypeVar

import torch
from kvferry_fabric import DeviceRange, SharedMemory
from kvferry_proto.layout import KVLayout

from kvferry_engine.cuda_memory import DeviceMemory, MappedMemory
from kvferry_engine.devices import on_gpu
from kvferry_engine.dtypes import torch_dtype
from kvferry_engine.errors import PageError
from kvferry_engine.worker_settings import CPU

T = TypeVar("T")


class KVPool:
    """Pages of all layers, shaped [layer][page][kv head][K/V][token][dim], filled with zeros when first touched.

    Of latents a page is [token][dim]: the axes of KV head and K/V have one entry each.
    """

    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        *,
        device: str = CPU,
        memory: SharedMemory | DeviceMemory | None = None,
        huge: bool = False,
        in_gpu: bool = False,
    ) -> None:
        """Make a pool of `pages` pages in `memory`, which belongs to the pool from now on, or in memory of its own.

        `in_gpu`: memory of its own is the GPU's that `device` names, and not the host's. `huge`: the host's is taken
        from the machine's reserved huge pages if they suffice. Raises ValueError if `memory` has not exactly the size
        of the pool; OSError or CudaError if there is no memory.
        """
        if pages < 1:
            msg = f"a KV pool must have at least one page, got {pages}: give it more memory or smaller pages"
            raise ValueError(msg)
        self.layout = layout
        self.pages = pages
        size = layout.layers * pages * layout.page_bytes
        if memory is not None and memory.size != size:
            msg = f"a KV pool of {pages} pages takes {size} bytes, the memory given has {memory.size}"
            raise ValueError(msg)
        if memory is None and in_gpu:
            memory = DeviceMemory.create(size, device)
        # Aligned to the machine's page, and, but for reserved huge pages, resident only where it has been written.
        self._memory = memory or SharedMemory.create(size, "kvferry-pool", huge=huge)
        self._mapped: MappedMemory | None = None
        shape = (layout.layers, pages, layout.heads_per_rank, layout.vectors, layout.page_size, layout.head_dim)
        self._tensor: torch.Tensor | None = self._bytes(device).view(torch_dtype(layout.dtype)).view(shape)

    def _bytes(self, device: str) -> torch.Tensor:
        """The memory as uint8, where `device` computes."""
        if isinstance(self._memory, DeviceMemory):
            return self._memory.tensor
        if on_gpu(device):
            self._mapped = MappedMemory(self._memory.buffer, device)
            return self._mapped.tensor
        return torch.frombuffer(self._memory.buffer, dtype=torch.uint8)

    @property
    def tensor(self) -> torch.Tensor:
        """The pool, [layer][page][kv head][K/V][token][dim]."""
        return _open(self._tensor)

    @property
    def buffer(self) -> memoryview:
        """The pool's bytes in host memory; the pool owns them. Raises ValueError where they are in a GPU's."""
        memory = self.shared
        if isinstance(memory, DeviceMemory):
            msg = f"the KV pool lies in the memory of {memory.device}"
            raise ValueError(msg)
        return memory.buffer

    @property
    def shared(self) -> SharedMemory | DeviceMemory:
        """The pool's memory, to be registered or handed to another process; the pool owns it and must outlive that."""
        _open(self._tensor)
        return self._memory

    @property
    def backing(self) -> str:
        """What its memory is, for people."""
        memory = self.shared
        return f"memory of {memory.device}" if isinstance(memory, DeviceMemory) else str(memory.backing)

    @property
    def registered(self) -> SharedMemory | DeviceRange:
        """What a fabric registers; the pool owns it and must outlive the registration."""
        memory = self.shared
        return memory.range() if isinstance(memory, DeviceMemory) else memory

    def settle(self) -> None:
        """Before a step: what has arrived is seen by it."""
        if isinstance(self._memory, DeviceMemory):
            self._memory.settle()

    @property
    def layer_stride(self) -> int:
        """Bytes from a page to the same page of the next layer."""
        return self.pages * self.layout.page_bytes

    @property
    def page_stride(self) -> int:
        """Bytes from a page to the next one of the same layer."""
        return self.layout.page_bytes

    def page_offset(self, layer: int, page: int) -> int:
        """Bytes from the pool's start to a page; raises PageError when there is no such page."""
        if not (0 <= layer < self.layout.layers and 0 <= page < self.pages):
            msg = f"page {page} of layer {layer} is outside a pool of {self.pages} pages, {self.layout.layers} layers"
            raise PageError(msg)
        return layer * self.layer_stride + page * self.page_stride

    def page(self, layer: int, page: int) -> memoryview:
        """Bytes of one page of one layer: in host memory writable and not copied, out of a GPU's memory a copy."""
        offset = self.page_offset(layer, page)
        if isinstance(self.shared, DeviceMemory):
            return memoryview(self.shared.tensor[offset : offset + self.page_stride].cpu().numpy().tobytes())
        return self.buffer[offset : offset + self.page_stride]

    def close(self) -> None:
        """Give the memory back; deregister it first. Views that others still hold keep it mapped until they go."""
        self._tensor = None
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(value: T | None) -> T:
    if value is None:
        msg = "the KV pool is closed"
        raise ValueError(msg)
    return value
