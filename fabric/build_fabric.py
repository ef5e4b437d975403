"""Describes the C extension kvferry_fabric._fabric to cffi; setup.py builds it. Paths are relative to setup.py."""

from pathlib import Path

from cffi import FFI

CSRC = Path("fabric/csrc")


def declarations(header: str) -> str:
    """Return the part of kf.h that cffi reads, so that the interface is written down once."""
    return header.split("/* cffi: begin */")[1].split("/* cffi: end */", maxsplit=1)[0]


ffibuilder = FFI()
ffibuilder.cdef(declarations((CSRC / "kf.h").read_text()))
ffibuilder.set_source(
    "kvferry_fabric._fabric",
    '#include "kf.h"',
    sources=sorted(str(path) for path in CSRC.glob("*.c")),
    depends=sorted(str(path) for path in CSRC.glob("*.h")),
    include_dirs=[str(CSRC)],
    libraries=["fabric"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    optional=True,
)
