"""Shared memory: what one process writes another sees, and nothing that could end a process with SIGBUS is taken."""

import errno
import fcntl
import gc
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvferry_engine.kv_pool import KVPool
from kvferry_fabric import SharedMemory, shared_memory
from kvferry_fabric.huge_pages import Backing, HugePages, huge_pages
from kvferry_proto.layout import KVLayout

LAYOUT = KVLayout(model="m", dtype="float32", layers=3, kv_heads=2, head_dim=8, page_size=4)
PAGES = 5

OTHER_RANK = """
import socket, sys
from kvferry_engine.kv_pool import KVPool
from kvferry_proto.layout import KVLayout
layout = KVLayout(model="m", dtype="float32", layers=3, kv_heads=2, head_dim=8, page_size=4)
with KVPool(layout, 5) as pool, socket.socket(fileno=int(sys.argv[1])) as connection:
    pool.tensor[1, 2] = 7.0
    pool.shared.send(connection)
    connection.recv(1)
    print(pool.tensor[2, 4].sum().item())
"""


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def open_fds() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_rank_of_another_process_computes_in_the_same_pool(ends):
    here, there = ends
    there.set_inheritable(True)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK, str(there.fileno())],
        pass_fds=[there.fileno()], stdout=subprocess.PIPE, text=True,
    ) as rank:  # fmt: skip
        there.close()
        with KVPool(LAYOUT, PAGES, memory=SharedMemory.receive(here)) as pool:
            assert (pool.tensor[1, 2] == 7.0).all()
            assert pool.tensor.sum() == 7.0 * pool.tensor[1, 2].numel()
            pool.tensor[2, 4] = 1.0
            here.send(b"!")
            assert rank.communicate(timeout=300)[0] == f"{float(pool.tensor[2, 4].numel())}\n"
            assert (pool.tensor[1, 2] == 7.0).all(), "the memory outlives the process that made it"


def test_nothing_is_left_of_it_once_closed(ends):
    before = open_fds()
    made = SharedMemory.create(10_000, "test")
    made.send(ends[0])
    mapped = SharedMemory.receive(ends[1])
    mapped.buffer[9_999] = 3
    assert made.buffer[9_999] == 3
    assert (made.size, len(made.buffer), mapped.size) == (10_000, 10_000, 10_000)
    for memory in (made, mapped, made):
        memory.close()
    assert open_fds() == before
    assert "memfd:test" not in Path("/proc/self/maps").read_text(encoding="ascii")
    with pytest.raises(ValueError, match="closed"):
        _ = made.buffer
    with pytest.raises(ValueError, match="closed"):
        made.send(ends[0])


def test_it_cannot_be_made_smaller():
    with SharedMemory.create(10_000, "test") as memory, pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 1)


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_is_no_memory(size):
    with pytest.raises(ValueError, match="at least one byte"):
        SharedMemory.create(size, "test")


def memfd(size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("make", "announced", "text"),
    [
        (lambda: memfd(100), 101, "101 bytes was announced, 100 came"),
        (lambda: memfd(100), 0, "0 bytes was announced"),
        (lambda: memfd(100, fcntl.F_SEAL_GROW), 100, "seals 0x4"),
        (lambda: os.open("/dev/null", os.O_RDWR), 100, "no memfd"),
    ],
)
def test_memory_that_cannot_be_relied_on_is_refused(ends, make, announced, text):
    before = open_fds()
    fd = make()
    socket.send_fds(ends[0], [struct.pack("!Q", announced)], [fd])
    os.close(fd)
    with pytest.raises(ValueError, match=text):
        SharedMemory.receive(ends[1])
    assert open_fds() == before


def test_another_end_that_is_gone_is_said(ends):
    ends[0].close()
    with pytest.raises(ConnectionError, match="is gone"):
        SharedMemory.receive(ends[1])


def test_huge_pages_that_are_missing_are_done_without(monkeypatch):
    asked = []

    def none_left(name, flags):
        asked.append(flags)
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOSPC, "no huge pages")
        return real(name, flags)

    real = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", none_left)
    with KVPool(LAYOUT, PAGES, huge=True) as pool:
        assert not pool.shared.huge
        assert not pool.tensor.any()
    assert [bool(flags & os.MFD_HUGETLB) for flags in asked] == [True, False]


def test_huge_pages_are_taken_whole_and_at_once(monkeypatch):
    # A machine of the tests has none reserved: ordinary memory stands in, the arithmetic is what is looked at.
    real, allocated = os.memfd_create, []
    monkeypatch.setattr(os, "memfd_create", lambda name, flags: real(name, flags & ~os.MFD_HUGETLB))
    monkeypatch.setattr(os, "posix_fallocate", lambda *what: allocated.append(what[1:]))
    with SharedMemory.create((2 << 20) + 5, "test", huge=True) as memory:
        assert memory.huge
        assert memory.backing is Backing.RESERVED
        assert len(memory.buffer) == memory.size == (2 << 20) + 5
        assert os.fstat(memory.fd).st_size % (2 << 20) == 0
        assert allocated == [(0, os.fstat(memory.fd).st_size)]


def test_memory_that_is_received_tells_reserved_pages_from_transparent_ones(ends, monkeypatch):
    real = os.fstat

    def in_transparent_pages(fd):
        stat = real(fd)
        return SimpleNamespace(st_size=stat.st_size, st_blksize=2 << 20)

    monkeypatch.setattr(os, "fstat", in_transparent_pages)
    monkeypatch.setattr(shared_memory, "huge_pages", lambda: HugePages(2 << 20, 0, 0, transparent=True))
    with SharedMemory.create(4 << 20, "test") as made:
        made.send(ends[0])
        with SharedMemory.receive(ends[1]) as mapped:
            assert mapped.backing is Backing.TRANSPARENT
            assert not shared_memory.in_huge_pages(mapped.fd)


def test_memory_in_reserved_pages_is_recognised():
    try:
        fd = os.memfd_create("test", os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel has no reserved huge pages: {error}")
    try:
        assert shared_memory.in_huge_pages(fd)
    finally:
        os.close(fd)


MEMINFO = "MemTotal:  1 kB\nHugePages_Total:  8\nHugePages_Free:  3\nHugepagesize:  2048 kB\nDirectMap1G:\n"


@pytest.mark.parametrize(
    ("setting", "transparent"),
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size [advise] never deny force", True),
        ("always [within_size] advise never deny force", True),
        ("always within_size advise never [deny] force", False),
        ("", False),
    ],
)
def test_what_huge_pages_a_machine_has_is_read(tmp_path, setting, transparent):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "shmem").write_text(setting)
    assert huge_pages(tmp_path / "meminfo", tmp_path / "shmem") == HugePages(2 << 20, 8, 3, transparent)


def test_a_machine_that_tells_nothing_of_huge_pages_has_none(tmp_path):
    assert huge_pages(tmp_path / "a", tmp_path / "b") == HugePages(0, 0, 0, transparent=False)


@pytest.mark.parametrize("transparent", [False, True])
def test_memory_says_what_pages_it_is_in(monkeypatch, transparent):
    machine = huge_pages()._replace(transparent=transparent)
    monkeypatch.setattr(shared_memory, "huge_pages", lambda: machine)
    with SharedMemory.create(4 << 20, "kvferry-asks") as memory:
        assert memory.backing == (Backing.TRANSPARENT if transparent else Backing.ORDINARY)
        assert asks_for_huge_pages("kvferry-asks") == Path("/sys/kernel/mm/transparent_hugepage").exists()
        memory.buffer[:] = bytes(4 << 20)


def asks_for_huge_pages(name: str) -> bool:
    """Whether the mapping of this name has the flag that madvise sets."""
    lines = Path("/proc/self/smaps").read_text(encoding="ascii").splitlines()
    at = next(i for i, line in enumerate(lines) if name in line)
    return " hg" in next(line for line in lines[at:] if line.startswith("VmFlags:"))


def test_a_pool_in_memory_of_another_size_is_refused():
    with SharedMemory.create(100, "test") as memory, pytest.raises(ValueError, match="the memory given has 100"):
        KVPool(LAYOUT, PAGES, memory=memory)


def test_a_page_of_a_closed_pool_stays_readable():
    pool = KVPool(LAYOUT, PAGES)
    pool.tensor[0, 1] = 5.0
    page = pool.page(0, 1)
    pool.close()
    assert torch.frombuffer(page, dtype=torch.float32)[0] == 5.0
