"""Which CPUs a fabric's thread is pinned to by default, given the NICs that it opens."""

from collections.abc import Callable
from functools import partial

import msgspec

from kvferry_fabric.topology.machine import Nic
from kvferry_fabric.topology.planning import CPU, Topology, cpus_for, plan


def pinned(topology: Topology, device: str = CPU) -> frozenset[int]:
    """Return the CPUs that the fabric's thread of `device` is pinned to; none where there is nothing to gain.

    Without a NIC nothing is near to anything, and where the thread may use every core of a plan it can as well be left
    alone. Raises TopologyError as Topology.share does.
    """
    cpus = cpus_for(topology, device)
    return cpus.fabric if topology.share(device).nics and cpus.fabric < cpus.fabric | cpus.workers else frozenset()


def pinned_near(topology: Topology, opened: Callable[[Nic], bool]) -> frozenset[int]:
    """Return the CPUs for a pool in host memory whose fabric opens those NICs for which `opened` holds.

    The other NICs' places don't matter then, nor do the GPUs'.
    """
    nics = tuple(nic for nic in topology.machine.nics if opened(nic))
    machine = msgspec.structs.replace(topology.machine, nics=nics, cores=topology.cores)
    return pinned(plan(machine, provider=topology.provider, cpu_pool=True))


def pins(topology: Topology) -> dict[int | None, frozenset[int]]:
    """Return where nodes with their pool in host memory are pinned, by the NUMA node of the NICs that they open."""
    nodes = sorted({nic.numa for nic in topology.machine.nics}, key=lambda node: -1 if node is None else node)
    near = {node: pinned_near(topology, partial(_is_on, node)) for node in nodes}
    return {node: cpus for node, cpus in near.items() if cpus}


def _is_on(node: int | None, nic: Nic) -> bool:
    return nic.numa == node
