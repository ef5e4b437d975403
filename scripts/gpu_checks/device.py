"""What there is: the GPU, its driver, and the packages that the CUDA side uses."""

import importlib.metadata

import torch

from gpu_checks import DEVICE

PACKAGES = ("cuda-bindings", "flashinfer-python")


def run() -> str:
    properties = torch.cuda.get_device_properties(DEVICE)
    total = torch.ones(1 << 20, device=DEVICE).sum().item()
    if total != 1 << 20:
        msg = f"a sum over 2^20 ones came to {total}"
        raise AssertionError(msg)
    memory = f"{properties.total_memory / (1 << 30):.0f} GiB"
    packages = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {memory}, capability {capability}, CUDA {torch.version.cuda}; {packages}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
