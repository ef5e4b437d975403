"""Prometheus metrics that every node has; each role adds a container of its own on the same registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector


class NodeMetrics:
    """Counters of a node's sockets and of its standing in the cluster."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.messages = Counter(
            "kvferry_messages",
            "Messages by type and direction (in, out).",
            ["type", "direction"],
            registry=self.registry,
        )
        self.wire_refused = Counter(
            "kvferry_wire_refused", "Multiparts that were refused, by reason.", ["reason"], registry=self.registry
        )
        self.handler_errors = Counter(
            "kvferry_handler_errors", "Messages whose handler failed, by type.", ["type"], registry=self.registry
        )
        self.send_failures = Counter(
            "kvferry_send_failures", "Messages not sent, by reason (full, gone).", ["reason"], registry=self.registry
        )
        self.channels = Gauge("kvferry_channels", "Open channels to peers.", registry=self.registry)
        self.heartbeats = Counter("kvferry_heartbeats", "Leases renewed.", registry=self.registry)
        self.redis_up = Gauge("kvferry_redis_up", "Whether the last call to Redis succeeded.", registry=self.registry)
        self.redis_errors = Counter("kvferry_redis_errors", "Calls to Redis that failed.", registry=self.registry)
        self.placements = Counter(
            "kvferry_placements",
            "Placements by way (redis, local) and outcome (placed, overloaded, no_nodes, prompt_too_long).",
            ["way", "outcome"],
            registry=self.registry,
        )


def process_metrics(registry: CollectorRegistry) -> None:
    """Add memory, CPU, file descriptors and garbage collection of this process; once per process."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
