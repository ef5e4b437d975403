"""Whether a node's KV pages lie in its GPU's memory or in the host's."""

from kvferry_fabric import takes_device_memory
from kvferry_node.errors import SettingsError

from kvferry_engine.devices import on_gpu
from kvferry_engine.worker_settings import WorkerSettings


def in_gpu(settings: WorkerSettings, device: str) -> bool:
    """Return whether the pool of a rank that computes on `device` is the GPU's memory.

    It is where the fabric can register that, unless told. Raises SettingsError where it is asked for and can't be.
    """
    if not on_gpu(device) or settings.kv_place == "host":
        return False
    possible = takes_device_memory(settings.provider, settings.fabric_hosts[0])
    if settings.kv_place == "gpu" and not possible:
        msg = f"--kv-place gpu: provider {settings.provider} does not take the memory of GPUs on this machine"
        raise SettingsError(msg)
    return possible
