"""Assembly: one router, from its settings to its end."""

import asyncio
from typing import Any

from kvferry_node.channels import Curve, Inbox, Post
from kvferry_node.logs import get_logger
from kvferry_node.metrics import NodeMetrics, process_metrics
from kvferry_node.ops import HttpServer, ops_routes, serve_http
from kvferry_node.pairs import PairWatch
from kvferry_node.placement import Placer
from kvferry_node.registry import MembershipView, Registry
from kvferry_node.service import Stop, process_state, running, watch_standstill
from kvferry_node.settings import node_ref
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role
from kvferry_proto.to_router import FromClient, FromDecoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from kvferry_router.dispatch import Dispatcher
from kvferry_router.http_api import Api
from kvferry_router.http_errors import http_exception, unexpected
from kvferry_router.jobs import JobMaker
from kvferry_router.limits import Limits
from kvferry_router.metrics import RouterMetrics
from kvferry_router.model_folder import ModelText
from kvferry_router.settings import RouterSettings
from kvferry_router.zmq_front import ZmqFront


class Router:
    """A router's parts, wired. Needs a running event loop."""

    def __init__(self, settings: RouterSettings, text: ModelText) -> None:
        """Bind the ZeroMQ port. Raises BindError, SettingsError."""
        self._settings = settings
        self.ref = node_ref(settings, Role.ROUTER)
        self._node_metrics = NodeMetrics()
        process_metrics(self._node_metrics.registry)
        curve = Curve.load(settings.curve_key_file)
        url, namespace = settings.redis_url, settings.namespace
        self._pairs = PairWatch()
        self._view = MembershipView(
            url,
            namespace,
            on_join=self._on_join,
            on_leave=self._on_leave,
            grace_seconds=settings.lease_seconds,
        )
        self._placer = Placer(url, namespace, self._view, self._node_metrics, node=self.ref.id)
        metrics = RouterMetrics(self._node_metrics.registry)
        self.dispatcher = Dispatcher(
            ref=self.ref,
            settings=settings,
            text=text,
            placer=self._placer,
            decoders=self._decoders,
            alive=self._alive,
            open_post=lambda handler, on_return: Post(
                self.ref, FromDecoder, handler, self._node_metrics, curve, on_return=on_return
            ),
            metrics=metrics,
        )
        jobs = JobMaker(settings, text, Limits(self._decoders, text.max_context))
        self._front = ZmqFront(
            self.dispatcher, jobs, metrics, settings.model_name, stall_seconds=settings.client_stall_seconds
        )
        self.inbox = Inbox(
            self.ref, settings.host, settings.zmq_port, FromClient, self._front.on_message, self._node_metrics, curve
        )
        self._api = Api(settings, self.dispatcher, jobs, text.tokenizer, metrics)
        self._stop = Stop()
        self.url = ""
        """Where HTTP is served; known once `started` is set."""
        self.started = asyncio.Event()
        self._log = get_logger()

    async def run(self, stop: Stop) -> None:
        """Serve until `stop`, then drain and leave."""
        self._stop = stop
        settings = self._settings
        try:
            server, _ = await serve_http(self._app(), settings.host, settings.http_port)
            self.url = server.url
            registry = Registry(
                settings.redis_url,
                settings.namespace,
                self._record(server),
                lease_seconds=settings.lease_seconds,
                heartbeat_seconds=settings.heartbeat_seconds,
                metrics=self._node_metrics,
            )
            try:
                await self._serve(server, registry)
            finally:
                await server.stop()
                await registry.close()
        finally:
            self.dispatcher.close()
            self.inbox.close()
            await self._placer.close()

    async def _serve(self, server: HttpServer, registry: Registry) -> None:
        standstill = watch_standstill(self._settings.standstill_seconds, self.dispatcher.stood_still)
        async with running(server.wait(), self.inbox.run(), self._view.run(), self._stay(registry), standstill):
            self._log.info("serving", http=server.url, zmq=self.inbox.endpoint, model=self._settings.model_name)
            self.started.set()
            await self._stop.requested.wait()
            self.dispatcher.draining = True
            await registry.set_draining()
            await self.dispatcher.drain(self._settings.drain_seconds)
            await self._front.close()
            await registry.leave()

    async def _stay(self, registry: Registry) -> None:
        await registry.join()
        await registry.run(self._load, list)

    def _app(self) -> Starlette:
        return Starlette(
            routes=[*self._api.routes(), *ops_routes(self._state, self._ready, self._node_metrics.registry)],
            exception_handlers={HTTPException: http_exception, Exception: unexpected},
        )

    def _record(self, server: HttpServer) -> NodeRecord:
        return NodeRecord(
            ref=self.ref,
            role=Role.ROUTER,
            endpoint=self.inbox.endpoint,
            model=self._settings.model_name,
            metrics=server.url,
        )

    def _load(self) -> Load:
        held = self.dispatcher.held()
        return Load(running=held["requests"] - held["waiting"], waiting=held["waiting"])

    def _on_join(self, record: NodeRecord) -> None:
        self._pairs.joined(record)
        self.dispatcher.on_join()

    def _on_leave(self, record: NodeRecord) -> None:
        self._pairs.left(record)
        self.dispatcher.on_leave(record)

    def _alive(self, ref: NodeRef) -> bool:
        record = self._view.nodes.get(ref.id)
        return record is not None and record.ref == ref

    def _decoders(self) -> list[NodeRecord]:
        """Decoders that this router can place on."""
        return [node for node in self._view.by_role(Role.DECODER) if node.model == self._settings.model_name]

    def _ready(self) -> str | None:
        """Why a request can't be served now, or None."""
        if self._stop.requested.is_set():
            return "draining"
        decoders = [node for node in self._decoders() if not node.draining]
        if not decoders:
            return "no decoder is up" if self._view.available else "redis is unreachable and no decoder is known"
        prefillers = [node for node in self._view.by_role(Role.PREFILLER) if not node.draining]
        need_none = self._settings.local_prefill or any(_prefills_all(node) for node in decoders)
        if not prefillers and not need_none:
            return "no prefiller is up, and decoders may not prefill by themselves (--no-local-prefill)"
        return None

    def _state(self) -> dict[str, Any]:
        return {
            "node": self.ref.id,
            "incarnation": f"{self.ref.incarnation:x}",
            "role": Role.ROUTER,
            "model": self._settings.model_name,
            "endpoint": self.inbox.endpoint,
            "held": self.dispatcher.held() | self._front.held(),
            "draining": self.dispatcher.draining,
            "decoder_channels": self.dispatcher.decoder_channels,
            "decoders": len(self._decoders()),
            "prefillers": len(self._view.by_role(Role.PREFILLER)),
            "redis": self._view.available,
            "process": process_state(),
        }


def _prefills_all(decoder: NodeRecord) -> bool:
    """Whether it prefills every prompt that it takes, whatever routers are told (--mixed)."""
    return 0 < decoder.max_context <= decoder.local_prefill_tokens
