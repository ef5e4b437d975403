"""A prefiller node, assembled."""

from kvferry_engine.ranks.processes import RankProcesses
from kvferry_engine.worker import Worker
from kvferry_engine.worker_node import WorkerNode
from kvferry_proto.nodes import NodeRecord, NodeRef, Role
from kvferry_proto.to_prefiller import ToPrefiller

from kvferry_prefiller.service import PrefillerService
from kvferry_prefiller.settings import PrefillerSettings


class PrefillerNode(WorkerNode):
    """One run of a prefiller."""

    role = Role.PREFILLER
    inbox_kind = ToPrefiller

    def __init__(self, settings: PrefillerSettings, ref: NodeRef, ranks: RankProcesses | None = None) -> None:
        super().__init__(settings, ref, ranks)
        self._own = settings

    def build(self, worker: Worker) -> PrefillerService:
        """Make the service, hearing the fabric."""
        service = PrefillerService(worker, self._own, self.ref, self.worker_metrics)
        service.listen()
        return service

    def describe(self, record: NodeRecord) -> NodeRecord:
        """A prefiller publishes nothing beyond what every worker does."""
        return record
