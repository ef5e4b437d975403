"""Memory that other processes of the host can map: a sealed memfd, handed over as a file descriptor.

A rank's KV pool lives in one, so that the process that owns the fabric can register what another process computes in,
and so that a peer on the same host can write into it without a NIC.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import struct
from typing import Self

from kvferry_fabric.huge_pages import Backing, huge_pages

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A mapping of memory that shrinks ends its process with SIGBUS: whoever maps it must know that it never will."""
_NO_HUGE_PAGES = {errno.ENOSPC, errno.ENOMEM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_SIZE = struct.Struct("!Q")


class SharedMemory:
    """Mapped memory of `size` bytes, zero when first touched, and the file descriptor that it can be mapped by."""

    def __init__(self, fd: int, size: int, *, huge: bool = False) -> None:
        """Map `size` bytes of the memfd `fd`, which belongs to this object from now on. Use create() or receive()."""
        self.size = size
        self.huge = huge
        """Whether it lies in reserved huge pages."""
        self._fd = fd
        try:
            self._mapping = mmap.mmap(fd, mapped_bytes(fd) if huge else size)
        except BaseException:
            os.close(fd)
            raise
        if not huge:
            with contextlib.suppress(OSError):  # a kernel without them
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._buffer: memoryview | None = memoryview(self._mapping)[:size]

    @classmethod
    def create(cls, size: int, name: str, *, huge: bool = False) -> Self:
        """Make new memory; `name` is what /proc/PID/maps shows. Raises OSError, ValueError for a size below 1.

        With `huge`, it is taken from the machine's reserved huge pages if they suffice, and else quietly not. Where the
        machine gives shared memory transparent huge pages for the asking, it asks.
        """
        if size < 1:
            msg = f"shared memory must have at least one byte, got {size}"
            raise ValueError(msg)
        fd = _huge_memfd(size, name) if huge else None
        if fd is not None:
            return cls(fd, size, huge=True)
        return cls(_memfd(size, name, 0), size)

    @classmethod
    def receive(cls, connection: socket.socket) -> Self:
        """Map what send() at the other end of a connected unix socket has handed over.

        Raises ConnectionError if the other end is gone, ValueError if what came is no memory that can be relied on.
        """
        data, fds, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
        try:
            if len(data) != _SIZE.size or len(fds) != 1:
                msg = "shared memory was awaited, and the other end sent something else or is gone"
                raise ConnectionError(msg)
            size = _SIZE.unpack(data)[0]
            _check(fds[0], size)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return cls(fds[0], size, huge=in_huge_pages(fds[0]))

    def send(self, connection: socket.socket) -> None:
        """Hand the memory to the process at the other end of a connected unix socket, which maps it with receive()."""
        socket.send_fds(connection, [_SIZE.pack(self.size)], [self.fd])

    @property
    def backing(self) -> Backing:
        """What pages it is in, as far as the machine's settings tell."""
        if self.huge:
            return Backing.RESERVED
        return Backing.TRANSPARENT if huge_pages().transparent else Backing.ORDINARY

    @property
    def fd(self) -> int:
        """The memfd; it stays this object's. Raises ValueError once it is closed."""
        self._open()
        return self._fd

    @property
    def buffer(self) -> memoryview:
        """The memory, writable. Raises ValueError once it is closed."""
        return self._open()

    def _open(self) -> memoryview:
        if self._buffer is None:
            msg = "the shared memory is closed"
            raise ValueError(msg)
        return self._buffer

    def close(self) -> None:
        """Let go of it. Views that others still hold keep it mapped until they go; other processes keep theirs."""
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        os.close(self._fd)
        try:
            buffer.release()
            self._mapping.close()
        except BufferError:
            # A view is alive: unmapping under it would crash, and the mapping goes with the last view anyway.
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mapped_bytes(fd: int) -> int:
    """Size of a memfd in bytes: in huge pages it is a multiple of theirs."""
    return os.fstat(fd).st_size


def in_huge_pages(fd: int) -> bool:
    """Whether a memfd is in reserved huge pages: those are a file system's own, whose blocks they are. A single file
    with transparent ones says the same of its own blocks."""
    return os.fstatvfs(fd).f_bsize > mmap.PAGESIZE


def _memfd(size: int, name: str, flags: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _huge_memfd(size: int, name: str) -> int | None:
    """A memfd in huge pages, all of them allocated: one that is missing when touched would end the process."""
    page = huge_pages().page_bytes
    if page == 0:
        return None
    whole = -(-size // page) * page
    try:
        return _allocated_memfd(whole, name)
    except OSError as error:
        if error.errno in _NO_HUGE_PAGES:
            return None
        raise


def _allocated_memfd(size: int, name: str) -> int:
    fd = _memfd(size, name, os.MFD_HUGETLB)
    try:
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, size: int) -> None:
    """Raise ValueError unless `fd` is a memfd of at least `size` bytes that can't shrink."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        msg = f"what was handed over is no memfd: {error.strerror}"
        raise ValueError(msg) from error
    if not seals & fcntl.F_SEAL_SHRINK or not 0 < size <= mapped_bytes(fd):
        msg = f"shared memory of {size} bytes was announced, {mapped_bytes(fd)} came, seals {seals:#x}"
        raise ValueError(msg)
