"""Where a node's fabric thread runs: as its settings say, or near its NICs."""

from kvferry_fabric.default_cpus import default_cpus
from kvferry_fabric.topology import TopologyError
from kvferry_fabric.topology.cpuset import from_list, to_list
from kvferry_node.logs import get_logger

from kvferry_engine.worker_settings import WorkerSettings

NONE = "none"


def fabric_cpus(settings: WorkerSettings) -> frozenset[int]:
    """Return the CPUs to pin the fabric's thread to; none: it is not pinned.

    A topology that can't be read is logged, and nothing is pinned then. Raises FabricUnavailableError if the provider
    is missing.
    """
    if settings.fabric_cpus == NONE:
        return frozenset()
    cpus = from_list(settings.fabric_cpus) if settings.fabric_cpus else _by_topology(settings)
    if cpus:
        get_logger().info("the fabric's thread is pinned", cpus=to_list(cpus))
    return cpus


def _by_topology(settings: WorkerSettings) -> frozenset[int]:
    try:
        return default_cpus(settings.provider, settings.fabric_hosts)
    except TopologyError as error:
        get_logger().warning("the fabric's thread is not pinned", reason=str(error))
        return frozenset()
