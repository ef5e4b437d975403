"""Memory that a GPU and others share: host memory that it reaches over its bus, and its own, which processes map.

Written after NVIDIA's documentation; docs/hardware.md says what has met a GPU.
"""

import os
import socket
import struct
from contextlib import ExitStack
from typing import Any, Self

import torch
from kvferry_fabric import DeviceRange

from kvferry_engine.cuda_driver import CudaError, call, current, load, ordinal

_SIZE = struct.Struct("!Q")


def round_up(size: int, granularity: int) -> int:
    """Least multiple of `granularity` that holds `size` bytes; raises ValueError where either is below 1."""
    if size < 1 or granularity < 1:
        msg = f"GPU memory of {size} bytes in pieces of {granularity} is not to be had"
        raise ValueError(msg)
    return -(-size // granularity) * granularity


class _Range:
    """Bytes at an address of a GPU, as torch takes them. The owner of the memory lives as long as the tensor does."""

    def __init__(self, pointer: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(pointer: int, size: int, device: str, owner: object) -> torch.Tensor:
    """Return `size` bytes at `pointer` as a uint8 tensor on `device`, not copied."""
    return torch.as_tensor(_Range(pointer, size, owner), device=device)


class MappedMemory:
    """Host memory that a GPU reads and writes in place, as long as this is open."""

    def __init__(self, buffer: memoryview, device: str) -> None:
        """Pin `buffer` and map it; whoever owns it closes this first. Raises CudaError."""
        driver = load()
        self._address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        self._device = device
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        with current(device), ExitStack() as undo:
            call(driver.cuMemHostRegister, self._address, buffer.nbytes, flags)
            undo.callback(driver.cuMemHostUnregister, self._address)
            self.pointer = int(call(driver.cuMemHostGetDevicePointer, self._address, 0))
            """Where the GPU finds it."""
            self.tensor = tensor_at(self.pointer, buffer.nbytes, device, None)
            """The bytes, on the GPU."""
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Wait for the GPU, and unpin; again is nothing."""
        with current(self._device):
            torch.cuda.synchronize()
            self._undo.close()


class DeviceMemory:
    """Memory of a GPU, zero at first, and the file descriptor that other processes of the host can map it by."""

    def __init__(self, fd: int, handle: Any, size: int, device: str) -> None:  # noqa: ANN401 - the driver's
        """Map an allocation; `fd` and `handle` belong to this object from now on. Use create() or receive()."""
        self.size = size
        self.device = device
        self._fd = fd
        self._dma_buf: int | None = None
        driver = load()
        with current(device), ExitStack() as undo:
            undo.callback(os.close, fd)
            undo.callback(driver.cuMemRelease, handle)
            self.mapped = round_up(size, _granularity(driver, _properties(driver, device)))
            """Bytes of the mapping: whole pieces of the driver's."""
            pointer = call(driver.cuMemAddressReserve, self.mapped, 0, 0, 0)
            undo.callback(driver.cuMemAddressFree, pointer, self.mapped)
            call(driver.cuMemMap, pointer, self.mapped, 0, handle, 0)
            undo.callback(driver.cuMemUnmap, pointer, self.mapped)
            call(driver.cuMemSetAccess, pointer, self.mapped, [_access(driver, device)], 1)
            self.pointer = int(pointer)
            self._bytes: torch.Tensor | None = tensor_at(self.pointer, size, device, None)
            self._ordered = _writes_ordered(driver, device)
            self._undo = undo.pop_all()

    @classmethod
    def create(cls, size: int, device: str) -> Self:
        """Allocate `size` bytes on `device`. Raises CudaError, ValueError for a size below 1."""
        driver = load()
        with current(device):
            properties = _properties(driver, device)
            whole = round_up(size, _granularity(driver, properties))
            handle = call(driver.cuMemCreate, whole, properties, 0)
            try:
                fd = int(call(driver.cuMemExportToShareableHandle, handle, _posix(driver), 0))
            except BaseException:
                driver.cuMemRelease(handle)
                raise
        memory = cls(fd, handle, size, device)
        memory.tensor.zero_()
        return memory

    @classmethod
    def receive(cls, connection: socket.socket, device: str) -> Self:
        """Map what send() at the other end of a connected unix socket has handed over; it lies on `device`.

        Raises ConnectionError if the other end is gone or sent something else, CudaError if it can't be mapped.
        """
        data, fds, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
        try:
            if len(data) != _SIZE.size or len(fds) != 1:
                msg = "GPU memory was awaited, and the other end sent something else or is gone"
                raise ConnectionError(msg)
            driver = load()
            with current(device):
                handle = call(driver.cuMemImportFromShareableHandle, fds[0], _posix(driver))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return cls(fds[0], handle, _SIZE.unpack(data)[0], device)

    def send(self, connection: socket.socket) -> None:
        """Hand the memory to the process at the other end of a connected unix socket, which maps it with receive()."""
        socket.send_fds(connection, [_SIZE.pack(self.size)], [self._fd])

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, uint8. Raises ValueError once it is closed."""
        if self._bytes is None:
            msg = "the GPU memory is closed"
            raise ValueError(msg)
        return self._bytes

    def range(self) -> DeviceRange:
        """Return what is registered with a fabric; its dma-buf is this object's."""
        if self._dma_buf is None:
            self._dma_buf = self._open_dma_buf()
            if self._dma_buf is not None:
                self._undo.callback(os.close, self._dma_buf)
        return DeviceRange(self.pointer, self.size, ordinal(self.device), self._dma_buf, self)

    def settle(self) -> None:
        """Have what a NIC has written seen by what the GPU is told to compute next, where that is not so by itself."""
        if self._ordered:
            return
        driver = load()
        target = driver.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        scope = driver.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
        with current(self.device):
            call(driver.cuFlushGPUDirectRDMAWrites, target, scope)

    def _open_dma_buf(self) -> int | None:
        """Open a dma-buf of the whole mapping; None where driver or GPU has none."""
        driver = load()
        kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        with current(self.device):
            try:
                return int(call(driver.cuMemGetHandleForAddressRange, self.pointer, self.mapped, kind, 0))
            except CudaError:
                return None

    def close(self) -> None:
        """Let go of it, once the GPU is done. Other processes keep theirs; views of it must not be used any more."""
        if self._bytes is None:
            return
        self._bytes = None
        with current(self.device):
            torch.cuda.synchronize()
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _posix(driver: Any) -> Any:  # noqa: ANN401
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(driver: Any, device: str) -> Any:  # noqa: ANN401
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _posix(driver)
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal(device)
    # A NIC may read and write it, where the GPU lets it.
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    properties.allocFlags.gpuDirectRDMACapable = int(call(driver.cuDeviceGetAttribute, attribute, ordinal(device)))
    return properties


def _writes_ordered(driver: Any, device: str) -> bool:  # noqa: ANN401
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    enough = driver.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    return int(call(driver.cuDeviceGetAttribute, attribute, ordinal(device))) >= int(enough)


def _granularity(driver: Any, properties: Any) -> int:  # noqa: ANN401
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call(driver.cuMemGetAllocationGranularity, properties, least))


def _access(driver: Any, device: str) -> Any:  # noqa: ANN401
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal(device)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
