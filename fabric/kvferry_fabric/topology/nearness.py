"""How near a NIC is to a GPU: what their data passes on the way."""

import enum

from kvferry_fabric.topology.machine import Gpu, Nic


class Nearness(enum.IntEnum):
    """The farther, the smaller."""

    SYSTEM = 0
    """Between NUMA nodes, or unknown."""
    NUMA = 1
    """Within a NUMA node, between host bridges."""
    HOST_BRIDGE = 2
    """Within a host bridge, between root ports."""
    SWITCH = 3
    """Below one bridge: never through the CPU."""


WORDS = {
    Nearness.SYSTEM: "across NUMA nodes",
    Nearness.NUMA: "same NUMA node",
    Nearness.HOST_BRIDGE: "same host bridge",
    Nearness.SWITCH: "same PCIe switch",
}


def nearness(gpu: Gpu, nic: Nic) -> tuple[Nearness, int]:
    """Return how near they are, and how many bridges both are below: among switches, the deeper the nearer."""
    shared = 0
    for ours, theirs in zip(gpu.path, nic.path, strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared:
        return (Nearness.SWITCH if shared > 1 else Nearness.HOST_BRIDGE), shared
    same = gpu.numa is not None and gpu.numa == nic.numa
    return (Nearness.NUMA if same else Nearness.SYSTEM), 0
