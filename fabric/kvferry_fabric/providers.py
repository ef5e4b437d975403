"""Which libfabric providers this machine has, and which one `auto` means."""

from kvferry_fabric.errors import FabricUnavailableError
from kvferry_fabric.native import load

LOCAL = "local"
"""No provider of libfabric: peers on this host map each other's memory."""

PROVIDERS = ("efa", "verbs", "tcp", "net", "shm", LOCAL)
"""Every provider that the fabric knows, best first. shm and local work within one host alone."""

AUTO = ("efa", "verbs", "tcp")
"""What `auto` chooses from, best first. Shared memory of peers on the same host is then written to without it."""


def providers(bind: str = "127.0.0.1") -> list[str]:
    """Return the providers that this machine offers, best first.

    `bind` is the local address of providers over IP. Raises FabricUnavailableError if the extension is not built.
    """
    _, lib = load()
    return [name for name in PROVIDERS if lib.kf_available(name.encode(), bind.encode())]


def takes_device_memory(provider: str, bind: str = "127.0.0.1") -> bool:
    """Whether a provider, which may be "auto", registers memory of GPUs on this machine (libfabric's FI_HMEM)."""
    _, lib = load()
    return bool(lib.kf_takes_device_memory(choose(provider, bind).encode(), bind.encode()))


def choose(provider: str, bind: str = "127.0.0.1") -> str:
    """Return `provider`, or the best one present if it is "auto". Raises FabricUnavailableError if there is none."""
    if provider == "auto":
        present = [name for name in providers(bind) if name in AUTO]
        if present:
            return present[0]
        msg = f"libfabric offers none of {', '.join(AUTO)} on {bind}: is {bind} an address of this host?"
        raise FabricUnavailableError(msg)
    if provider in PROVIDERS:
        return provider
    msg = f"provider {provider!r} is not one of auto, {', '.join(PROVIDERS)}"
    raise FabricUnavailableError(msg)
