"""The arrows between packages, read from the source: who may import whom, and what nobody may use."""

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROLES = ("router", "prefiller", "decoder")
FOLDERS = ("proto", "fabric", "engine", "client", "services/node", *(f"services/{role}" for role in ROLES))
CLI = Path("client/kvferry/cli")

PROTO, FABRIC, ENGINE, NODE = "kvferry_proto", "kvferry_fabric", "kvferry_engine", "kvferry_node"
CLIENT, ROUTER, PREFILLER, DECODER = "kvferry", "kvferry_router", "kvferry_prefiller", "kvferry_decoder"

# Package -> our own packages that it may import.
ARROWS = {
    PROTO: set(),
    FABRIC: {PROTO},
    NODE: {PROTO},
    ENGINE: {PROTO, FABRIC, NODE},
    CLIENT: {PROTO},
    ROUTER: {PROTO, NODE},
    PREFILLER: {PROTO, FABRIC, NODE, ENGINE},
    DECODER: {PROTO, FABRIC, NODE, ENGINE},
}
# What is too heavy, or not there, where these packages run.
NEVER = {
    PROTO: {"torch", "numpy", "zmq", "redis"},
    CLIENT: {"torch", "numpy", "redis", "uvloop", "starlette", "uvicorn"},
    NODE: {"torch", "numpy", "cffi"},
    ROUTER: {"torch", "numpy", "cffi"},
}
LIBRARY = {"zmq", "msgspec", "orjson", PROTO, CLIENT}
"""All that the client library outside the command line may import, beside the standard library."""


def sources():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("kvferry*/**/*.py")):
            yield path.relative_to(ROOT)


def package_of(path):
    return next(part for part in path.parts if part.startswith("kvferry"))


@functools.cache
def tree_of(path):
    return ast.parse((ROOT / path).read_text(), str(path))


def imported(tree):
    """Top names of all imports, at module level and inside functions alike."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


SOURCES = list(sources())


def test_every_package_is_looked_at():
    assert {package_of(path) for path in SOURCES} == set(ARROWS)


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_imports_follow_the_arrows(package):
    allowed = ARROWS[package] | {package}
    for path in (path for path in SOURCES if package_of(path) == package):
        ours = {name for name in imported(tree_of(path)) if name in ARROWS}
        assert ours <= allowed, f"{path} imports {', '.join(sorted(ours - allowed))}"


@pytest.mark.parametrize("package", sorted(NEVER))
def test_light_packages_stay_light(package):
    for path in (path for path in SOURCES if package_of(path) == package):
        heavy = set(imported(tree_of(path))) & NEVER[package]
        assert not heavy, f"{path} imports {', '.join(sorted(heavy))}"


def test_the_client_library_needs_three_packages_alone():
    for path in SOURCES:
        if package_of(path) != CLIENT or path.is_relative_to(CLI):
            continue
        foreign = set(imported(tree_of(path))) - sys.stdlib_module_names - LIBRARY
        assert not foreign, f"{path} imports {', '.join(sorted(foreign))}"


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_no_source_unpickles_prints_or_catches_blindly(package):
    for path in (path for path in SOURCES if package_of(path) == package):
        assert not set(imported(tree_of(path))) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
        _check_nodes(path)


def _check_nodes(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno}: bare except"
        if isinstance(node, ast.Call):
            _check_call(node, path)


def _check_call(node, path):
    match node.func:
        case ast.Name("print"):
            assert path.is_relative_to(CLI), f"{path}:{node.lineno}: print outside the command line"
        case ast.Name("eval" | "exec"):
            pytest.fail(f"{path}:{node.lineno}: {node.func.id}")
        case ast.Attribute(_, "recv_pyobj" | "send_pyobj"):
            pytest.fail(f"{path}:{node.lineno}: a pickle on a socket")
        case ast.Attribute(ast.Name("torch"), "load"):
            pytest.fail(f"{path}:{node.lineno}: torch.load unpickles; use safetensors")
