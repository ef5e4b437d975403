"""Where a node computes: the processor, or GPUs of the machine.

Nothing here starts CUDA: a node forks its ranks after it has looked, and CUDA does not survive a fork.
"""

import torch
from kvferry_node.errors import SettingsError

from kvferry_engine.worker_settings import CPU


def resolve(wanted: str, ranks: int = 1) -> tuple[str, ...]:
    """Return the torch device of each rank for --device `wanted`: one after the other from the GPU that it names.

    auto is cuda where torch finds a GPU. Raises SettingsError where there are not as many as `ranks`.
    """
    count = _gpus()
    if wanted == CPU or (wanted == "auto" and not count):
        return (CPU,) * ranks
    first = int(wanted.partition(":")[2] or 0)
    if first + ranks > count:
        msg = f"--device {wanted}: {_needed(first, ranks)}, {_found(count)}"
        raise SettingsError(msg)
    return tuple(f"cuda:{first + rank}" for rank in range(ranks))


def on_gpu(device: str) -> bool:
    """Whether a torch device is a GPU."""
    return device != CPU


def _gpus() -> int:
    # Through NVML where it is there, which leaves CUDA alone; torch.cuda.is_available() would start it.
    return torch.cuda.device_count() if torch.version.cuda is not None else 0


def _needed(first: int, ranks: int) -> str:
    if ranks == 1:
        return f"GPU {first} is needed"
    return f"GPUs {first} to {first + ranks - 1} are needed, one for each of --tp {ranks}"


def _found(count: int) -> str:
    if torch.version.cuda is None:
        return f"and torch {torch.__version__} is built without CUDA: install a CUDA build, or take --device cpu"
    return f"and torch finds {count} on this machine: see nvidia-smi and CUDA_VISIBLE_DEVICES, or take --device cpu"
