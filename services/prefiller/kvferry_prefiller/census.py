"""What a prefiller says of itself: to placement, to metrics, and to the check that an idle node holds nothing."""

from collections.abc import Sized

from kvferry_engine.worker import Worker
from kvferry_proto.nodes import Load

from kvferry_prefiller.scheduler import Scheduler
from kvferry_prefiller.sender import Sender


class Census:
    """Counts over the prefiller's parts; changes none of them. `requests` and `reports`: those that are not over."""

    def __init__(
        self, worker: Worker, requests: Sized, reports: Sized, *, scheduler: Scheduler, sender: Sender
    ) -> None:
        self._worker = worker
        self._requests = requests
        self._reports = reports
        self._scheduler = scheduler
        self._sender = sender

    def load(self) -> Load:
        """What placement weighs."""
        scheduler = self._scheduler
        return Load(
            free_pages=self._worker.allocator.free_pages,
            running=len(scheduler.running) + len(scheduler.leaving),
            waiting=len(scheduler.waiting),
            queued_tokens=scheduler.queued_tokens,
        )

    def states(self) -> dict[str, int]:
        """Requests by state."""
        scheduler = self._scheduler
        return {"waiting": len(scheduler.waiting), "running": len(scheduler.running), "leaving": len(scheduler.leaving)}

    def held(self) -> dict[str, int]:
        """What must be zero when idle, beyond what every worker holds."""
        return {
            "transfers": self._sender.active,
            "reports": len(self._reports),
            "peers": self._worker.fabric.stats().peers,
        }

    def under_way(self) -> bool:
        """Whether a request is here, or is being reported."""
        return bool(len(self._requests) or len(self._reports))
