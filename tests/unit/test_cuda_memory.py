"""What of a GPU's memory needs no GPU: sizes, the driver's codes, what is undone, and what is said to be missing."""

import contextlib
import enum
import socket
from types import SimpleNamespace

import pytest
import torch
from kvferry_engine import cuda_driver, cuda_memory
from kvferry_engine.cuda_driver import CudaError, call
from kvferry_engine.cuda_memory import DeviceMemory, round_up, tensor_at


@pytest.mark.parametrize(("size", "whole"), [(1, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20)])
def test_sizes_are_whole_pieces_of_the_drivers(size, whole) -> None:
    assert round_up(size, 2 << 20) == whole


@pytest.mark.parametrize(("size", "granularity"), [(0, 4096), (-1, 4096), (1, 0)])
def test_no_memory_is_no_size(size, granularity) -> None:
    with pytest.raises(ValueError, match="not to be had"):
        round_up(size, granularity)


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


def test_the_drivers_codes_become_values_or_errors() -> None:
    assert call(lambda: (Code.CUDA_SUCCESS,)) is None
    assert call(lambda size: (Code.CUDA_SUCCESS, size), 5) == 5

    def cuMemCreate():  # noqa: N802 - as the driver says it
        return (Code.CUDA_ERROR_OUT_OF_MEMORY, None)

    with pytest.raises(CudaError, match=r"^cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY$"):
        call(cuMemCreate)


def test_a_machine_without_a_driver_is_told_so() -> None:
    def cuInit():  # noqa: N802
        msg = "libcuda.so was not found"
        raise RuntimeError(msg)

    with pytest.raises(CudaError, match=r"libcuda.so was not found: .*NVIDIA's driver"):
        call(cuInit)


def test_missing_bindings_are_named(monkeypatch) -> None:
    def nothing(name):
        msg = f"No module named {name!r}"
        raise ModuleNotFoundError(msg)

    monkeypatch.setattr(cuda_driver.importlib, "import_module", nothing)
    with pytest.raises(CudaError, match=r"cuda.bindings.driver.*pip install 'kvferry\[cuda\]'"):
        DeviceMemory.create(4096, "cuda:0")


def test_the_device_is_the_one_that_is_named() -> None:
    assert [cuda_driver.ordinal(device) for device in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]


def test_another_end_that_is_gone_is_noticed(monkeypatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ConnectionError, match="GPU memory was awaited"):
        DeviceMemory.receive(ours, "cuda:0")


def test_torch_is_given_bytes_and_where_they_lie(monkeypatch) -> None:
    given = []
    monkeypatch.setattr(torch, "as_tensor", lambda memory, *, device: given.append((memory, device)))
    owner = SimpleNamespace()
    tensor_at(0x7F00_0000_0000, 4096, "cuda:1", owner)
    ((memory, device),) = given
    assert (device, memory.owner) == ("cuda:1", owner)
    assert memory.__cuda_array_interface__ == {
        "shape": (4096,), "typestr": "|u1", "data": (0x7F00_0000_0000, False), "strides": None, "version": 3,
    }  # fmt: skip


class Driver:
    """The driver's calls in the order in which they come; one of them may fail."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.failing = failing

    def __getattr__(self, name):
        if name.startswith(("CUmemAllocationProp", "CUmemAccessDesc")):
            return lambda: SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())
        if not name.startswith("cu"):  # an enumeration
            return SimpleNamespace(**dict.fromkeys(KINDS, 0))

        def function(*_):
            self.calls.append(name)
            failed = name == self.failing
            value = {"cuMemGetAllocationGranularity": 1 << 21, "cuDeviceGetAttribute": 1}.get(name, 1 << 40)
            return (Code.CUDA_ERROR_OUT_OF_MEMORY if failed else Code.CUDA_SUCCESS, value)

        function.__name__ = name
        return function


KINDS = (
    "CU_MEM_ALLOCATION_TYPE_PINNED", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "CU_MEM_LOCATION_TYPE_DEVICE",
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE", "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD",
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING",
    "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER",
)  # fmt: skip
MADE = {"cuMemCreate": "cuMemRelease", "cuMemAddressReserve": "cuMemAddressFree", "cuMemMap": "cuMemUnmap"}


@pytest.fixture
def closed_fds(monkeypatch) -> list[int]:
    """The files that were closed; torch's part is played."""
    closed: list[int] = []
    monkeypatch.setattr(cuda_memory.os, "close", closed.append)
    monkeypatch.setattr(cuda_memory, "current", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_memory, "tensor_at", lambda _pointer, size, _device, _owner: torch.empty(size))
    return closed


@pytest.mark.parametrize("failing", ["", "cuMemExportToShareableHandle", *MADE, "cuMemSetAccess"])
def test_what_was_made_is_unmade_however_it_ends(monkeypatch, closed_fds, failing) -> None:
    driver = Driver(failing)
    monkeypatch.setattr(cuda_memory, "load", lambda: driver)
    if failing:
        with pytest.raises(CudaError, match=failing):
            DeviceMemory.create(4096, "cuda:0")
    else:
        memory = DeviceMemory.create(4096, "cuda:0")
        assert (memory.size, memory.mapped, closed_fds) == (4096, 1 << 21, [])
        memory.close()
        memory.close()
        with pytest.raises(ValueError, match="closed"):
            _ = memory.tensor
    order = [name for name in driver.calls if name in {*MADE, *MADE.values()} and name != failing]
    made = [name for name in order if name in MADE]
    assert order == [*made, *(MADE[name] for name in reversed(made))]
    exported = "cuMemExportToShareableHandle" in driver.calls and failing != "cuMemExportToShareableHandle"
    assert closed_fds == ([1 << 40] if exported else [])
