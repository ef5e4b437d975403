"""The C extension; everything else is in pyproject.toml.

It is optional: without a compiler or libfabric's headers the installation succeeds, and opening a transfer engine
later says what is missing. The client library and the router need neither.
"""

from setuptools import setup

setup(cffi_modules=["fabric/build_fabric.py:ffibuilder", "engine/build_engine.py:ffibuilder"])
