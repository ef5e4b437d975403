"""Describes the C extension kvferry_engine._kernels to cffi; setup.py builds it. Paths are relative to setup.py."""

from pathlib import Path

from cffi import FFI

CSRC = Path("engine/csrc")

ffibuilder = FFI()
ffibuilder.cdef((CSRC / "kernels.h").read_text().split("/* cffi: begin */")[1].split("/* cffi: end */", maxsplit=1)[0])
ffibuilder.set_source(
    "kvferry_engine._kernels",
    '#include "kernels.h"',
    sources=[str(path) for path in sorted(CSRC.glob("*.c"))],
    depends=[str(path) for path in sorted(CSRC.glob("*.h"))],
    include_dirs=[str(CSRC)],
    # OpenMP at compile time alone: at run time its calls go to the OpenMP that torch brings, whose threads are there
    # anyway. Without torch the import fails at once (-z now), and nothing is lost.
    extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fopenmp"],
    extra_link_args=["-Wl,-z,now"],
    optional=True,
)
