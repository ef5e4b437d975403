"""What the router counts and measures."""

from typing import Final

from kvferry_proto.timeline import Timeline, summary_ms
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """Metrics of one router, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"kvferry_{name}_seconds", text, buckets=_SECONDS, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvferry_{name}", text, labels, registry=registry)

        self.queue = histogram("queue", "From a request's receipt to its first prefill chunk, or the decode batch")
        self.prefill = histogram("prefill", "From the start of a prompt's first chunk to the end of its last")
        self.exposed_transfer = histogram("exposed_transfer", "Transfer that the prefill did not hide")
        self.ttft = histogram("ttft", "From a request's receipt to its first token, in the router")
        self.inter_token = histogram("inter_token", "Between two tokens of an answer, in the router")
        self.requests = counter("requests_total", "Requests answered", "endpoint", "status")
        self.retries = counter("retries_total", "Attempts that were followed by another one", "reason")
        self.late = counter("late_messages_total", "Messages of attempts that were over", "type")
        self.cancel_timeouts = counter("cancel_timeouts_total", "Cancels that no decoder confirmed in time")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of finished requests")
        self.answer_tokens = counter("answer_tokens_total", "Tokens streamed to clients")
        self.in_flight = Gauge("kvferry_requests_in_flight", "Requests that are not over", registry=registry)
        self.waiting = Gauge(
            "kvferry_requests_waiting", "Requests that wait for a free place, or for a node", registry=registry
        )

    def finished(self, timeline: Timeline) -> None:
        """Enter a finished request's phases; those that it did not have are left out."""
        router, prefiller = timeline.router, timeline.prefiller
        if router.first_token:
            self.ttft.observe((router.first_token - router.received) / 1e9)
        queued = summary_ms(timeline).get("queued_ms")
        if queued is not None:
            self.queue.observe(max(0.0, queued / 1e3))
        if prefiller is not None and prefiller.chunks:
            self.prefill.observe((prefiller.chunks[-1].ended - prefiller.chunks[0].started) / 1e9)
            self.exposed_transfer.observe(prefiller.exposed_ns / 1e9)
