"""The C extension behind the package: loading it, and turning its errors into exceptions."""

import ctypes
import importlib
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from kvferry_fabric.errors import FabricError, FabricUnavailableError
from kvferry_fabric.leftovers import remove_leftovers

_MISSING = (
    "kvferry's fabric extension is not built on this machine ({reason}). It needs a C compiler and libfabric: "
    "apt install gcc libfabric-dev, then install kvferry again (pip install --force-reinstall --no-deps kvferry, or "
    "python setup.py build_ext --inplace in a clone)"
)


# Read by libfabric at its first call. A connection over rxm allocates message buffers, which we never use (20 ms of
# page faults at the default size), and takes several looks at connection events (10 ms apart by default).
LIBFABRIC_SETTINGS = {"FI_OFI_RXM_BUFFER_SIZE": "512", "FI_OFI_RXM_CM_PROGRESS_INTERVAL": "200"}

# Over sockets a receiver reads that much ahead (9000 bytes by default), and copies it to where it belongs: the header
# of a write of one piece, so that what follows goes straight to its place. Scattered pages of 4, 8, 16 KiB, four a
# write, go at 1.3, 1.2, 1.2 times their speed so over tcp and net, of 2 and 1 KiB at 0.9 and 0.6.
LIBFABRIC_SETTINGS |= {"FI_TCP_PREFETCH_RBUF_SIZE": "48", "FI_NET_PREFETCH_RBUF_SIZE": "48"}

# Libraries that libfabric links (PSM and PSM2) take SIGTERM, SIGINT and others for themselves when they are loaded.
LIBFABRIC_SETTINGS |= {"HFI_NO_BACKTRACE": "1", "IPATH_NO_BACKTRACE": "1"}


def load() -> tuple[Any, Any]:
    """Return cffi's (ffi, lib). Raises FabricUnavailableError naming what is missing."""
    for name, value in LIBFABRIC_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        fabric = importlib.import_module("kvferry_fabric._fabric")  # optional at build time
    except ImportError as error:
        raise FabricUnavailableError(_MISSING.format(reason=error)) from error
    return fabric.ffi, fabric.lib


class NativeEngine:
    """An open kf_engine, shared by the engine and the handles that it gave out."""

    def __init__(self, options: dict[str, Any], provider: str, binds: Sequence[str], cpus: Sequence[int] = ()) -> None:
        """Open it, with a domain for each of `binds` and its thread pinned to `cpus`, if any.

        Raises FabricError, or FabricUnavailableError if the extension or the provider is missing.
        """
        self.ffi, self.lib = load()
        if provider == "shm":
            remove_leftovers()
        names = [self.ffi.new("char[]", name.encode()) for name in (provider, *binds)]
        pointers = self.ffi.new("const char *[]", names[1:])
        places = self.ffi.new("uint32_t[]", list(cpus))
        fields = {"provider": names[0], "binds": pointers, "domains": len(binds)}
        fields |= {"cpus": places, "cpu_count": len(cpus)}
        settings = self.ffi.new("kf_options *", {**fields, **options})
        error = self.new_error()
        pointer = self.lib.kf_open(settings, error)
        if not pointer:
            text, code = self.describe(error)
            missing = not all(self.lib.kf_available(names[0], bind) for bind in names[1:])
            raise FabricUnavailableError(text, code) if missing else FabricError(text, code)
        self._pointer: Any = pointer

    @property
    def pointer(self) -> Any:  # noqa: ANN401 - a cdata pointer
        """The kf_engine pointer. Raises FabricError once the engine is closed."""
        if self._pointer is None:
            msg = "the transfer engine is closed"
            raise FabricError(msg)
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._pointer is None

    def close(self) -> None:
        """Stop the thread and free everything. No other call may be running."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self.lib.kf_close(pointer)

    def address_of(self, pointer: Any) -> int:  # noqa: ANN401 - a cdata pointer
        """Return what a C pointer holds."""
        return int(self.ffi.cast("uintptr_t", pointer))

    def keeping_the_interpreter(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes' types; a callable
        """Return a C function without result, which may not block, to be called without giving up the interpreter."""
        address = self.address_of(self.ffi.addressof(self.lib, name))
        return ctypes.PYFUNCTYPE(None, *arguments)(address)

    def new_error(self) -> Any:  # noqa: ANN401 - a cdata pointer
        """Return a fresh kf_error for a call to fill."""
        return self.ffi.new("kf_error *")

    def describe(self, error: Any) -> tuple[str, int]:  # noqa: ANN401 - a cdata pointer
        """Return (text, positive errno) of a filled kf_error."""
        return self.ffi.string(error.text).decode(errors="replace"), -error.code

    def fail(self, error: Any) -> NoReturn:  # noqa: ANN401 - a cdata pointer
        """Raise FabricError for a filled kf_error."""
        raise FabricError(*self.describe(error))

    def check(self, code: int, what: str) -> int:
        """Return `code`, or raise FabricError naming `what` if it is negative."""
        if code < 0:
            reason = self.ffi.string(self.lib.kf_strerror(code)).decode()
            msg = f"{what}: {reason}"
            raise FabricError(msg, -code)
        return code
