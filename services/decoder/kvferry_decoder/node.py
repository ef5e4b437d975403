"""A decoder node, assembled."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from kvferry_engine.errors import ModelError
from kvferry_engine.grammar import read_ahead
from kvferry_engine.ranks.processes import RankProcesses
from kvferry_engine.worker import Worker
from kvferry_engine.worker_node import WorkerNode
from kvferry_node.channels import Handler, Post
from kvferry_node.logs import get_logger
from kvferry_proto.nodes import NodeRecord, NodeRef, Role
from kvferry_proto.to_decoder import FromPrefiller, FromRouter

from kvferry_decoder.service import DecoderService
from kvferry_decoder.settings import DecoderSettings


class DecoderNode(WorkerNode):
    """One run of a decoder."""

    role = Role.DECODER
    inbox_kind = FromRouter

    def __init__(self, settings: DecoderSettings, ref: NodeRef, ranks: RankProcesses | None = None) -> None:
        super().__init__(settings, ref, ranks)
        self._own = settings

    def load(self) -> Worker:
        """Load the model, and read the tokenizer for grammars: no other thread runs meanwhile."""
        worker = super().load()
        try:
            read_ahead(Path(worker.settings.model), worker.config.vocab_size)
        except (OSError, ValueError, ModelError) as error:
            get_logger().warning("answers can't be held to grammars here", why=str(error))
        return worker

    def build(self, worker: Worker) -> DecoderService:
        """Make the service, with its channels to prefillers, hearing the fabric."""

        def open_post(handler: Handler, on_return: Callable[[NodeRef], None]) -> Post:
            return Post(self.ref, FromPrefiller, handler, self.metrics, self.curve, on_return=on_return)

        service = DecoderService(worker, self._own, self.ref, self.worker_metrics, open_post)
        service.listen()
        return service

    def describe(self, record: NodeRecord) -> NodeRecord:
        """Say how much it takes. A mixed node prefills whatever fits into a request."""
        local = record.max_context if self._own.mixed else self._own.local_prefill_tokens
        return msgspec.structs.replace(record, max_running=self._own.max_running, local_prefill_tokens=local)
