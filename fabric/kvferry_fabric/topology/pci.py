"""The PCI side: addresses, what a class code means, and how fast a link is."""

import re

from kvferry_fabric.topology.errors import TopologyError
from kvferry_fabric.topology.machine import EFA, ETHERNET, INFINIBAND

_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])")

NVIDIA, AMD, AMAZON = 0x10DE, 0x1002, 0x1D0F
GPU_CLASSES = {NVIDIA: {0x0300, 0x0302}, AMD: {0x0380, 0x1200}}
"""Vendor -> PCI classes of its GPUs that compute. What draws a server's or a laptop's screen is none of them."""
NETWORK = 0x02
"""Base class of network controllers."""
INFINIBAND_CLASS, ETHERNET_CLASS, OTHER_NETWORK_CLASS = 0x0207, 0x0200, 0x0280
EFA_DEVICES = range(0xEFA0, 0xEFB0)
ENCODED_8_10_GTS = 5.0
"""Up to this rate, links send 10 bits for 8; above, 130 for 128."""


def address(text: str) -> str:
    """Return a PCI address in sysfs' form, 0000:53:00.0. CUDA's and NVML's longer domains (00000000:53:00.0) are taken.

    Raises TopologyError if it is none.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        msg = f"{text[:80]!r} is no PCI address"
        raise TopologyError(msg)
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def sort_key(text: str) -> tuple[int, ...]:
    """Order of PCI addresses on the bus; domains longer than four digits come last, as they should."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", text))


def is_gpu(vendor: int, code: int) -> bool:
    """Tell whether a function of this vendor and class (base and sub class, 16 bits) is a GPU that computes."""
    return code in GPU_CLASSES.get(vendor, ())


def link_layer(vendor: int, device: int, code: int) -> str:
    """What a network function speaks, as far as its PCI identity tells; "" if it does not."""
    if vendor == AMAZON and device in EFA_DEVICES:
        return EFA
    return {INFINIBAND_CLASS: INFINIBAND, ETHERNET_CLASS: ETHERNET}.get(code, "")


def link_gbps(transfers: float, width: int) -> float | None:
    """Rate of a link in Gb/s from GT/s and lanes, after encoding; None for a link that is down."""
    payload = 8 / 10 if transfers <= ENCODED_8_10_GTS else 128 / 130
    return round(transfers * width * payload, 1) or None
