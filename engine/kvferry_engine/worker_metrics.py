"""Metrics that prefillers and decoders share."""

from collections.abc import Callable, Iterable

from kvferry_fabric import EngineStats
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector


class _Refresh(Collector):
    """Has no metric of its own: being collected first, it brings the gauges up to date."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh = refresh

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self._refresh()
        return ()


class WorkerMetrics:
    """What a node that runs the model counts. docs/architecture.md has the table."""

    def __init__(self, registry: CollectorRegistry, refresh: Callable[[], None]) -> None:
        """`refresh` is called before the gauges are read."""
        registry.register(_Refresh(refresh))
        self.pages = Gauge("kvferry_pages", "KV pages by state.", ["state"], registry=registry)
        self.prefix = Gauge(
            "kvferry_prefix_cache", "Pages that the prefix cache hit, published, evicted.", ["what"], registry=registry
        )
        self.requests = Gauge("kvferry_node_requests", "Requests here by state.", ["state"], registry=registry)
        self.ended = Counter("kvferry_node_ended", "Requests that ended here, by how.", ["how"], registry=registry)
        self.steps = Counter("kvferry_steps", "Forward passes.", registry=registry)
        self.step_seconds = Histogram("kvferry_step_seconds", "Time of a forward pass.", registry=registry)
        self.tokens = Counter("kvferry_tokens", "Tokens by kind (prefilled, drawn).", ["kind"], registry=registry)
        self.drafts = Counter("kvferry_drafts", "Drafts verified, by result.", ["result"], registry=registry)
        self.accepted = Histogram(
            "kvferry_accepted_length",
            "Drafts of a request that were right, of those verified in one step.",
            buckets=range(17),
            registry=registry,
        )
        self.transfers = Counter(
            "kvferry_transfers", "KV transfers that ended here, by how.", ["how"], registry=registry
        )
        self.verified = Counter(
            "kvferry_verified_pages", "Pages compared with their source, by result.", ["result"], registry=registry
        )
        self.fabric = Gauge(
            "kvferry_fabric", "Counts of the fabric's engine since start, or held now.", ["what"], registry=registry
        )
        self.leaks = Counter("kvferry_idle_leaks", "Idle checks that found something held.", registry=registry)

    def show_pages(self, states: dict[str, int]) -> None:
        """Set the page gauges."""
        for state, count in states.items():
            self.pages.labels(state).set(count)

    def show_prefix(self, counts: dict[str, int]) -> None:
        """Set the prefix cache's counts since start."""
        for what, count in counts.items():
            self.prefix.labels(what).set(count)

    def show_drafts(self, verified: int, right: int) -> None:
        """Count a request's drafts in one step."""
        self.drafts.labels("accepted").inc(right)
        self.drafts.labels("rejected").inc(verified - right)
        self.accepted.observe(right)

    def show_fabric(self, stats: EngineStats) -> None:
        """Set the fabric's gauges: pages, bytes and writes moved, stale immediates, what is held."""
        for name, value in stats._asdict().items():
            self.fabric.labels(name).set(value)

    def show_requests(self, states: dict[str, int]) -> None:
        """Set the request gauges."""
        for state, count in states.items():
            self.requests.labels(state).set(count)
