"""Where a request goes: what it asks of placement, and what is known of the nodes' caches."""

import functools
import itertools
from collections.abc import Callable

from kvferry_node.placement import Placement, PlacementAsk, Placer
from kvferry_proto.errors import ErrorCode, KvferryError
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRecord, NodeRef

from kvferry_router.admission import Admission
from kvferry_router.attempt import Attempt
from kvferry_router.metrics import RouterMetrics
from kvferry_router.prefix_memory import PrefixMemory
from kvferry_router.request import Request
from kvferry_router.settings import RouterSettings

COMES_BACK = frozenset({ErrorCode.NODE_LOST, ErrorCode.DRAINING, ErrorCode.STALE_INCARNATION})
"""Errors that say that a node is gone."""


class Placing:
    """Finds nodes for each attempt of a request. Belongs to the event loop."""

    def __init__(
        self,
        *,
        ref: NodeRef,
        settings: RouterSettings,
        placer: Placer,
        decoders: Callable[[], list[NodeRecord]],
        alive: Callable[[NodeRef], bool],
        metrics: RouterMetrics,
    ) -> None:
        """`alive`: whether this life of a node is in the cluster, as far as this router has heard."""
        self._ref = ref
        self._settings = settings
        self._decoders = decoders
        self._alive = alive
        self._admission = Admission(
            placer, metrics, line_length=settings.admission_queue, line_seconds=settings.admission_seconds
        )
        self._memory = PrefixMemory(settings.prefix_blocks)
        self._numbers = itertools.count(1)
        self._page = 1

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return self._admission.waiting

    def on_join(self) -> None:
        """A node has come."""
        self._admission.on_join()

    def on_leave(self, record: NodeRecord) -> None:
        """A node is gone, and what it had cached."""
        self._memory.forget(record.ref)

    async def place(self, request: Request, avoid: set[NodeRef], cause: KvferryError | None) -> Placement:
        """Reserve. With nobody left to try, what brought us here is the better answer than that nobody is left.

        A node that is gone may be started again, or another for it; one that failed the request won't be. `cause`: the
        error of the attempt before. Raises KvferryError.
        """
        gone = cause is not None and cause.error.code in COMES_BACK
        seconds = self._settings.recovery_seconds if gone else 0.0
        ask, again = functools.partial(self._ask, request, avoid), cause is not None
        try:
            return await self._admission.place(ask, again=again, recovery_seconds=seconds)
        except KvferryError as error:
            if cause is not None and error.error.code is ErrorCode.NO_NODES:
                raise cause from error
            raise

    def release(self, placement: Placement, *, decoder: bool = True) -> None:
        """Give back, in the background, what nodes have not taken over; only the prefiller's part without `decoder`."""
        self._admission.release(placement, decoder=decoder)

    def remember(self, attempt: Attempt) -> None:
        """Prompt and answer but for its last token are in the decoder's pages, the prompt in the prefiller's.

        Of a node that has left while the answer grew nothing is left, and nobody would forget it again.
        """
        job, layout = attempt.request.job, attempt.decoder.layout
        if layout is None or not self._settings.prefix_affinity:
            return
        tokens = [*job.tokens, *attempt.request.answer.token_ids]
        if self._alive(attempt.decoder.ref):
            self._memory.note(attempt.decoder.ref, layout, tokens[:-1], job.cache_salt)
        if attempt.prefiller is not None and self._alive(attempt.prefiller.ref):
            self._memory.note(attempt.prefiller.ref, layout, job.tokens[:-1], job.cache_salt)

    async def close(self) -> None:
        """Wait for reservations on their way back."""
        await self._admission.close()

    def _ask(self, request: Request, avoid: set[NodeRef]) -> PlacementAsk:
        tokens = len(request.job.tokens) + len(request.answer.token_ids)
        room = request.answer.room
        return PlacementAsk(
            request_id=f"{self._ref.id}-{self._ref.incarnation:x}-{next(self._numbers)}",
            tokens=tokens,
            pages=-(-(tokens + min(room, self._settings.reserve_answer_tokens)) // self._page_size()),
            model=self._settings.model_name,
            context=tokens + room,
            exclude=frozenset(avoid),
            local_prefill=self._settings.local_prefill,
            held=self._held(request),
            affinity=self._settings.prefix_affinity,
        )

    def _layouts(self) -> list[KVLayout]:
        return [record.layout for record in self._decoders() if record.layout is not None]

    def _page_size(self) -> int:
        """The smallest page in the cluster, or the last known: so no decoder is asked for too few, or too many."""
        self._page = min((layout.page_size for layout in self._layouts()), default=self._page)
        return self._page

    def _held(self, request: Request) -> dict[str, int]:
        """Who has how many of the tokens. Where decoders differ in their layouts, those that are like the first."""
        layouts = self._layouts()
        if not layouts or not self._settings.prefix_affinity:
            return {}
        tokens = [*request.job.tokens, *request.answer.token_ids]
        return self._memory.held(layouts[0], tokens[:-1], request.job.cache_salt)
