"""KV from prefillers: asks for it, follows it, checks it, and calls it off.

Joins three parts: the scheduler's receiving requests, the receiver's transfers, and the messages to and from
prefillers. A request leaves through `on_ready` or `on_failure`; its transfer may live on in quarantine.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry_engine.context_slots import ContextSlots
from kvferry_engine.worker import Worker
from kvferry_fabric import Event, EventKind
from kvferry_node.channels import Origin, Post
from kvferry_node.errors import ChannelError
from kvferry_node.logs import get_logger
from kvferry_node.membership import VIEW_LAG_NS
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.message import Refused
from kvferry_proto.nodes import NodeRef, Peer
from kvferry_proto.shards import Piece
from kvferry_proto.timeline import now
from kvferry_proto.to_decoder import CancelConfirmed, PrefillFailed, PrefillReport

from kvferry_decoder import ordering
from kvferry_decoder.cancels import Cancels
from kvferry_decoder.receiver import Receiver, Transfer, TransferState
from kvferry_decoder.request import Request
from kvferry_decoder.settings import DecoderSettings


@dataclass(eq=False)
class Incoming:
    """A receiving request and its transfer."""

    request: Request
    transfer: Transfer
    pieces: list[Piece]
    """The shard plan: what arrives for each page of each layer."""
    deadline: int
    """Monotonic ns."""
    arrived: bool = False
    checksums: Int32s | None = None
    context_checksum: int | None = None


class Intake:
    """Owns what is on its way. All in the event loop's thread."""

    def __init__(
        self,
        worker: Worker,
        receiver: Receiver,
        post: Post,
        settings: DecoderSettings,
        *,
        name: str,
        on_ready: Callable[[Incoming], None],
        on_failure: Callable[[Request, RequestError], None],
        surrender: Callable[[Request], list[int]],
        context: ContextSlots | None = None,
    ) -> None:
        """`context`: the slots that the receiver registers, where hidden states are wanted beside the pages."""
        self._worker = worker
        self._context = context
        self._receiver = receiver
        self._post = post
        self._name = name
        self._deadline_ns = int(settings.transfer_seconds * 1e9)
        self._cancels = Cancels(receiver, post, settings.cancel_retry_seconds)
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._surrender = surrender
        self._incoming: dict[str, Incoming] = {}
        self._log = get_logger()

    def __len__(self) -> int:
        return len(self._incoming)

    # --- begin -----------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Arm a slot for a request whose pages are reserved, then ask its prefiller."""
        peer, layout = request.prefiller, self._worker.layout
        assert peer is not None
        try:
            arrivals = len(ordering.pieces_of(peer, layout, self._name))
        except ValueError as error:
            self._on_failure(request, self._error(ErrorCode.LAYOUT_MISMATCH, str(error), Phase.ASSIGN, peer))
            return
        pages, states = len(ordering.lacking(request, layout)), int(self._context is not None)
        transfer = self._receiver.expect(request.id, peer, pages * layout.layers * arrivals + states)
        pieces = ordering.pieces_of(peer, layout, self._name, transfer.slot.number)
        self._incoming[request.id] = Incoming(request, transfer, pieces, now() + self._deadline_ns)
        try:
            self._post.to(peer).send(ordering.order(request, transfer, self._worker))
            request.asked = True
        except (ChannelError, ValueError) as error:
            # Nothing left this node, so nothing can be written: no quarantine.
            self.fail(request, self._error(ErrorCode.NODE_LOST, str(error), Phase.PREFILL, peer), told=False)

    # --- what the fabric and prefillers say ------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Take an event of a slot."""
        transfer = self._receiver.find(event.slot, event.generation)
        if event.kind is EventKind.OVERRUN:
            self._log.error("more pages arrived than were expected", slot=event.slot, pages=event.pages)
        if event.kind is not EventKind.ARRIVED or transfer is None or transfer.state is not TransferState.EXPECTING:
            return
        if self._context is not None:
            # Before the slot is given back: its row is the next user's then.
            self._incoming[transfer.request_id].request.context = self._context.take(transfer.slot.number)
        self._receiver.arrived(transfer)
        incoming = self._incoming[transfer.request_id]
        timeline = incoming.request.timeline
        timeline.first_page, timeline.last_page = event.first_arrival_ns, event.last_arrival_ns
        incoming.arrived = True
        self._finish_if_complete(incoming)

    def on_report(self, origin: Origin, report: PrefillReport) -> None:
        """The prefiller is through. Only with checksums does anything wait for this."""
        transfer = self._transfer_of(origin, report.slot, report.generation, report.request_id)
        if transfer is not None:
            self._receiver.confirm(transfer)
        incoming = self._incoming.get(report.request_id)
        if incoming is not None and incoming.transfer.peer.ref == origin.sender:
            incoming.checksums = report.checksums
            incoming.context_checksum = report.context_checksum
            self._finish_if_complete(incoming)

    def on_confirmed(self, origin: Origin, message: CancelConfirmed) -> None:
        """Nothing of a cancelled transfer is in flight: its pages and slot are free again."""
        # One that nobody here called off: the prefiller took this node for lost, and has let go of the request.
        text = f"prefiller {origin.sender} has given the request up"
        node = origin.sender.id
        error = RequestError(code=ErrorCode.TRANSFER_FAILED, message=text, phase=Phase.TRANSFER, node=node, avoid=False)
        self._is_over(origin, message, error)

    def on_failed(self, origin: Origin, message: PrefillFailed) -> None:
        """The prefiller gave up, and nothing of it is in flight."""
        self._is_over(origin, message, message.error)

    def _is_over(self, origin: Origin, message: CancelConfirmed | PrefillFailed, error: RequestError) -> None:
        """Fail a request that still waits for pages, or for their checksums; else end a transfer's quarantine."""
        incoming = self._incoming.get(message.request_id)
        if incoming is not None and incoming.transfer.answers(origin.sender, message.slot, message.generation):
            self.fail(incoming.request, error, told=False)
            return
        transfer = self._transfer_of(origin, message.slot, message.generation, message.request_id)
        if transfer is not None:
            self._receiver.confirm(transfer)

    def on_refused(self, origin: Origin, message: Refused) -> None:
        """The prefiller could not take a message: it has restarted since, or failed on it. It did nothing."""
        incoming = self._incoming.get(message.about)
        if incoming is not None and origin.peer is not None and incoming.transfer.peer.ref == origin.peer.ref:
            code = ErrorCode.STALE_INCARNATION if message.reason == "stale" else ErrorCode.PROTOCOL
            text = f"the prefiller refused the request: {message.reason}: {message.detail}"
            self.fail(
                incoming.request, self._error(code, text, Phase.PREFILL, origin.peer), told=message.reason != "stale"
            )
        self._log.warning("refused by a prefiller", reason=message.reason, detail=message.detail, request=message.about)

    def _transfer_of(self, origin: Origin, slot: int, generation: int, request_id: str) -> Transfer | None:
        transfer = self._receiver.find(slot, generation)
        if transfer is None or transfer.peer.ref != origin.sender or transfer.request_id != request_id:
            return None
        return transfer

    def _finish_if_complete(self, incoming: Incoming) -> None:
        if incoming.arrived and (incoming.checksums is not None or not self._worker.settings.verify_kv):
            del self._incoming[incoming.request.id]
            self._on_ready(incoming)

    # --- ends ------------------------------------------------------------------------------------------------

    def call_off(self, request: Request, *, told: bool = True) -> None:
        """Let go of a receiving request's transfer, before the request ends.

        `told`: the prefiller has heard of it, so pages and slot go into quarantine and it is asked to confirm.
        """
        incoming = self._incoming.pop(request.id, None)
        if incoming is None or incoming.transfer.state is not TransferState.EXPECTING:
            return
        transfer = incoming.transfer
        self._receiver.abandon(transfer, self._surrender(request))
        if told:
            self._cancels.ask(transfer)
        else:
            self._receiver.confirm(transfer)

    def fail(self, request: Request, error: RequestError, *, told: bool = True) -> None:
        """Call a transfer off and fail its request."""
        self.call_off(request, told=told)
        self._on_failure(request, error)

    def prefiller_lost(self, ref: NodeRef) -> None:
        """Nobody will confirm: fail what waits for this prefiller, and take its keys to our memory away."""
        self._fail_all(ref, f"prefiller {ref} was lost while it sent the prompt's KV")
        lost = [transfer for transfer in self._receiver.transfers if transfer.peer.ref == ref]
        if lost:
            self._receiver.revoke(lost)
        self._post.forget(ref)

    def connection_broke(self, ref: NodeRef) -> None:
        """The connection to a prefiller broke, and is there again: what was asked, or was answered, may be lost."""
        self._fail_all(ref, f"the connection to prefiller {ref} broke while it prefilled", avoid=False)

    def _fail_all(self, ref: NodeRef, text: str, *, avoid: bool = True) -> None:
        error = RequestError(code=ErrorCode.NODE_LOST, message=text, phase=Phase.TRANSFER, node=ref.id, avoid=avoid)
        for incoming in [entry for entry in self._incoming.values() if entry.transfer.peer.ref == ref]:
            self.fail(incoming.request, error)

    def sweep(self, alive: Callable[[NodeRef], bool]) -> None:
        """Look after deadlines, unconfirmed cancels, and prefillers that left without anyone noticing."""
        at = now()
        for incoming in [entry for entry in self._incoming.values() if entry.deadline < at]:
            text = "the prompt's KV did not arrive in time"
            self.fail(incoming.request, self._error(ErrorCode.TIMEOUT, text, Phase.TRANSFER, incoming.transfer.peer))
        self._cancels.ask_again(at)
        self._receiver.close_revoked()
        begun = {entry.transfer.peer.ref: entry.deadline - self._deadline_ns for entry in self._incoming.values()}
        for ref in {transfer.peer.ref for transfer in self._receiver.transfers}:
            if not alive(ref) and at - begun.get(ref, 0) > VIEW_LAG_NS:
                self.prefiller_lost(ref)

    def _error(self, code: ErrorCode, text: str, phase: Phase, peer: Peer) -> RequestError:
        return RequestError(code=code, message=text, phase=phase, node=peer.ref.id)
