"""What a decoder says of itself: to placement, to metrics, and to the check that an idle node holds nothing."""

from collections.abc import Mapping

from kvferry_engine.worker import Worker
from kvferry_proto.nodes import Load

from kvferry_decoder.answers import Answers
from kvferry_decoder.intake import Intake
from kvferry_decoder.receiver import Receiver
from kvferry_decoder.request import Request, State
from kvferry_decoder.scheduler import Scheduler
from kvferry_decoder.verifier import Verifier


class Census:
    """Counts over the decoder's parts; changes none of them."""

    def __init__(
        self,
        worker: Worker,
        requests: Mapping[str, Request],
        *,
        scheduler: Scheduler,
        receiver: Receiver,
        intake: Intake,
        answers: Answers,
        verifier: Verifier,
    ) -> None:
        self._worker = worker
        self._requests = requests
        self._scheduler = scheduler
        self._receiver = receiver
        self._intake = intake
        self._answers = answers
        self._verifier = verifier

    def load(self) -> Load:
        """What placement weighs. Reservations end with `admitted`, so that whoever is here has to count."""
        scheduler, waiting = self._scheduler, [*self._scheduler.waiting, *self._compiling()]
        promised = sum(self._worker.layout.pages_for(len(request.tokens)) for request in waiting)
        return Load(
            free_pages=max(0, self._worker.allocator.free_pages - promised),
            running=len(scheduler.running) + len(scheduler.receiving),
            waiting=len(waiting),
            queued_tokens=sum(request.uncomputed - 1 for request in scheduler.running),
        )

    def states(self) -> dict[str, int]:
        """Requests by state."""
        scheduler = self._scheduler
        return {
            "compiling": len(self._compiling()),
            "waiting": len(scheduler.waiting),
            "receiving": len(scheduler.receiving),
            "running": len(scheduler.running),
        }

    def held(self) -> dict[str, int]:
        """What must be zero when idle, beyond what every worker holds."""
        return {
            "leaving": len(self._scheduler.leaving),
            "slots": self._receiver.slots.held,
            "incoming": len(self._intake),
            "unreported": len(self._answers),
            "checks": len(self._verifier),
            "armed_slots": self._worker.fabric.stats().armed_slots,
        }

    def under_way(self) -> bool:
        """Whether a request is here, or was and a step, a check or a prefiller's word is still to come."""
        rest = len(self._verifier) or len(self._answers) or self._receiver.transfers
        return bool(self._requests or self._scheduler.leaving or rest)

    def _compiling(self) -> list[Request]:
        return [request for request in self._requests.values() if request.state is State.COMPILING]
