"""Where the fabric's thread runs if nobody says: near the NICs that it opens."""

import os
from collections.abc import Callable, Sequence

from kvferry_fabric.interfaces import hardware_below, interface_of
from kvferry_fabric.providers import choose
from kvferry_fabric.topology import Machine, Topology, detect, pinned_near, plan

BY_ADDRESS = {"tcp", "net", "verbs"}
"""Providers whose NICs are those that have the addresses which they bind to."""
ALL_NICS = {"efa"}
"""Those that take whatever NIC of theirs comes first."""


def default_cpus(provider: str, binds: Sequence[str], machine: Callable[[], Machine] = detect) -> frozenset[int]:
    """Return the logical CPUs near the NICs that `provider` opens on `binds`, for a pool in host memory.

    Empty where the thread may run anywhere: no NIC is opened (loopback, shared memory), or all cores are as near.
    Raises TopologyError if the topology can't be read, FabricUnavailableError as choose() does.
    """
    chosen = choose(provider, binds[0])
    if chosen not in BY_ADDRESS | ALL_NICS:
        return frozenset()
    interfaces = frozenset().union(*(_hardware(bind) for bind in binds)) if chosen in BY_ADDRESS else None
    if interfaces is not None and not interfaces:
        return frozenset()
    here: Topology = plan(machine(), provider=chosen, allowed=os.sched_getaffinity(0))
    return pinned_near(here, lambda nic: interfaces is None or not interfaces.isdisjoint(nic.interfaces))


def _hardware(bind: str) -> frozenset[str]:
    interface = interface_of(bind)
    return hardware_below(interface) if interface else frozenset()
