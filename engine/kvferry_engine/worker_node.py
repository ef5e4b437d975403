"""The life of a node that runs the model, prefiller or decoder: load, join, serve, drain, leave."""

import asyncio
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from kvferry_node.channels import Curve, Inbox
from kvferry_node.logs import get_logger
from kvferry_node.membership import MembershipView
from kvferry_node.metrics import NodeMetrics, process_metrics
from kvferry_node.ops import ops_app, serve_http
from kvferry_node.registry import Registry
from kvferry_node.service import Stop, process_state, running, wait_until, watch_standstill
from kvferry_proto.errors import ErrorCode
from kvferry_proto.nodes import NodeRecord, NodeRef, Role

from kvferry_engine.ranks.processes import RankProcesses
from kvferry_engine.worker import Worker
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_engine.worker_service import WorkerService
from kvferry_engine.worker_settings import WorkerSettings

# After draining, how long cancelled transfers may take to be confirmed before memory is taken down under them.
_CONFIRM_SECONDS = 5.0

AnyService = WorkerService[Any, Any]


class WorkerNode(ABC):
    """One run of a node. `main` is what kvferry_node.service.run runs."""

    role: ClassVar[Role]
    inbox_kind: ClassVar[Any]

    def __init__(self, settings: WorkerSettings, ref: NodeRef, ranks: RankProcesses | None = None) -> None:
        """`ranks`: processes of the ranks beside this one, forked before there was an event loop."""
        self.settings = settings
        self._ranks = ranks or RankProcesses()
        self.ref = ref
        self.metrics = NodeMetrics()
        self.worker_metrics = WorkerMetrics(self.metrics.registry, self._refresh)
        self.curve = Curve.load(settings.curve_key_file)
        self._log = get_logger()
        self._why_not_ready: str | None = "loading the model"
        self._worker: Worker | None = None
        self._service: AnyService | None = None
        process_metrics(self.metrics.registry)

    @abstractmethod
    def build(self, worker: Worker) -> AnyService:
        """Make the service, in the running loop."""

    @abstractmethod
    def describe(self, record: NodeRecord) -> NodeRecord:
        """Add what this role publishes about itself."""

    def load(self) -> Worker:
        """Load what takes long, in a thread, before the node joins. Raises what `Worker` does."""
        return Worker(self.settings, self.ref, self._ranks, progress=self._on_progress)

    async def main(self, stop: Stop) -> None:
        """Live until `stop` is requested, then drain and leave."""
        app = ops_app(self.state, lambda: self._why_not_ready, self.metrics.registry)
        http, _ = await serve_http(app, self.settings.host, self.settings.http_port)
        try:
            worker = await self._load(stop)
            if worker is not None:
                await self._serve(worker, http.url, stop)
        finally:
            await http.stop()

    async def _load(self, stop: Stop) -> Worker | None:
        """Load the model beside the loop, so that /health answers; None if the node is stopped meanwhile."""
        loading = asyncio.ensure_future(asyncio.to_thread(self.load))
        stopping = asyncio.ensure_future(stop.requested.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        worker = await loading
        if not stop.requested.is_set():
            return worker
        worker.close()
        return None

    def _on_progress(self, done: int, total: int) -> None:
        self._why_not_ready = f"loading the model: {100 * done // total} %"

    async def _serve(self, worker: Worker, url: str, stop: Stop) -> None:
        settings = self.settings
        self._worker = worker
        self._service = service = self.build(worker)
        inbox = Inbox(
            self.ref, settings.host, settings.zmq_port, self.inbox_kind, service.on_message, self.metrics, self.curve
        )
        registry = Registry(
            settings.redis_url,
            settings.namespace,
            self.describe(self._record(worker, inbox.endpoint, url)),
            lease_seconds=settings.lease_seconds,
            heartbeat_seconds=settings.heartbeat_seconds,
            metrics=self.metrics,
        )
        view = MembershipView(
            settings.redis_url,
            settings.namespace,
            on_leave=lambda record: service.node_left(record.ref),
            grace_seconds=settings.lease_seconds,
        )

        def alive(ref: NodeRef) -> bool:
            record = view.nodes.get(ref.id)
            return not view.available or (record is not None and record.ref == ref)

        try:
            async with running(
                inbox.run(),
                view.run(),
                service.run(),
                service.housekeeping(alive),
                watch_standstill(settings.standstill_seconds, service.stood_still),
                self._watch(worker, service),
                self._watch_ranks(worker, service, registry),
            ):
                await self._join_and_serve(registry, service, stop)
        finally:
            await registry.close()
            service.close()
            worker.close()

    async def _join_and_serve(self, registry: Registry, service: AnyService, stop: Stop) -> None:
        self._why_not_ready = "waiting for Redis"
        joining = asyncio.ensure_future(registry.join())
        stopping = asyncio.ensure_future(stop.requested.wait())
        await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            return
        await joining
        async with running(registry.run(service.load, service.admitted)):
            self._why_not_ready = None
            record = registry.record
            self._log.info("ready", model=record.model, endpoint=record.endpoint, http=record.metrics)
            await stopping
            await self._drain(registry, service)
            await registry.leave()

    async def _drain(self, registry: Registry, service: AnyService) -> None:
        """Take nothing new, finish what runs, and let no write be in flight when memory goes."""
        self._why_not_ready = "draining"
        service.draining = True
        await registry.set_draining()
        if not await wait_until(lambda: _idle(service), self.settings.drain_seconds):
            self._log.warning("drain time is over", held=service.held())
            service.fail_rest(ErrorCode.DRAINING, "its time to drain was over")
            await wait_until(lambda: _idle(service), _CONFIRM_SECONDS)

    async def _watch_ranks(self, worker: Worker, service: AnyService, registry: Registry) -> None:
        """End with the first rank that does: hand what runs back, so that others take it up at once, and leave."""
        lost = await worker.ranks.watch()
        self._log.critical("a rank is lost; its node ends", why=str(lost))
        self._why_not_ready = str(lost)
        service.draining = True
        service.fail_rest(ErrorCode.NODE_LOST, str(lost))
        await registry.leave()
        raise lost

    def _record(self, worker: Worker, endpoint: str, url: str) -> NodeRecord:
        return NodeRecord(
            ref=self.ref,
            role=self.role,
            endpoint=endpoint,
            model=self.settings.model_name,
            layout=worker.layout,
            provider=worker.fabric.pairing,
            total_pages=worker.pool.pages,
            max_context=worker.max_context,
            max_waiting=self.settings.max_waiting,
            metrics=url,
        )

    async def _watch(self, worker: Worker, service: AnyService) -> None:
        """Keep gauges fresh, and prove now and then that an idle node holds nothing."""
        before: dict[str, int] = {}
        while True:
            await asyncio.sleep(self.settings.idle_check_seconds)
            held = {name: count for name, count in service.held().items() if count}
            # Seen twice: what was held at both looks, with nothing here that is still to end, is held by nobody.
            if held and held == before and not service.under_way():
                self.worker_metrics.leaks.inc()
                self._log.error("idle, and still holding", **held)
            before = held
            worker.allocator.check()

    def _refresh(self) -> None:
        if self._worker is not None and self._service is not None:
            self.worker_metrics.show_pages(self._worker.page_state())
            self.worker_metrics.show_prefix(self._worker.prefix_state())
            self.worker_metrics.show_fabric(self._worker.fabric.stats())
            self.worker_metrics.show_requests(self._service.states())

    def state(self) -> dict[str, Any]:
        """What /state shows."""
        shown: dict[str, Any] = {"role": self.role, "node": self.ref.id, "incarnation": f"{self.ref.incarnation:x}"}
        if self._worker is not None and self._service is not None:
            shown |= {
                "held": self._service.held(),
                "ranks": self._worker.ranks.pids,
                "pages": self._worker.page_state(),
                "prefix_cache": self._worker.prefix_state(),
                "fabric": self._worker.fabric.stats()._asdict(),
                "requests": self._service.states(),
            }
        return shown | {"process": process_state()}


def _idle(service: AnyService) -> bool:
    return not any(service.held().values())
