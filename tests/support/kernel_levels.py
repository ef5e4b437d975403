"""Each set of instructions that the kernels know and this processor has."""

import importlib

import pytest
from kvferry_engine.kernels import kernels

found = kernels()
LEVELS = range(1, found.level + 1) if found is not None else ()
needs_kernels = pytest.mark.skipif(found is None, reason="no AVX2 here, or the extension was not built")


@pytest.fixture(params=LEVELS, ids=lambda level: ("", "avx2", "avx512", "amx")[level])
def level(request):
    """The kernels use this level, and no more."""
    lib = importlib.import_module("kvferry_engine._kernels").lib
    assert lib.kv_limit_level(request.param) == request.param
    yield request.param
    lib.kv_limit_level(LEVELS[-1])
