"""Asks prefillers to call transfers off, until they confirm it or are gone."""

from kvferry_node.channels import Post
from kvferry_node.errors import ChannelError
from kvferry_node.logs import Throttle, get_logger
from kvferry_proto.timeline import now
from kvferry_proto.to_prefiller import CancelPrefill

from kvferry_decoder.receiver import Receiver, Transfer


class Cancels:
    """Remembers nothing by itself: what awaits a confirmation is in the receiver's quarantine."""

    def __init__(self, receiver: Receiver, post: Post, retry_seconds: float) -> None:
        """`retry_seconds`: how often a prefiller that has not confirmed is asked again."""
        self._receiver = receiver
        self._post = post
        self._retry_ns = int(retry_seconds * 1e9)
        self._log = get_logger()
        self._throttle = Throttle(5.0)

    def ask(self, transfer: Transfer) -> None:
        """Ask a transfer's prefiller to post nothing more of it, and to say when nothing is in flight."""
        transfer.asked_at = now()
        try:
            self._post.to(transfer.peer).send(
                CancelPrefill(
                    request_id=transfer.request_id, slot=transfer.slot.number, generation=transfer.slot.generation
                )
            )
        except ChannelError as error:
            self._log.warning("cancel not sent; trying again", peer=str(transfer.peer.ref), error=str(error))

    def ask_again(self, at: int) -> None:
        """Ask for every confirmation that has been awaited for long; `at` is now, monotonic ns."""
        for transfer in self._receiver.transfers:
            if transfer.awaits_confirmation and transfer.asked_at + self._retry_ns < at:
                self._warn(transfer)
                self.ask(transfer)

    def _warn(self, transfer: Transfer) -> None:
        if (held := self._throttle.passes("not confirmed")) is not None:
            pages, peer = len(transfer.quarantined_pages), str(transfer.peer.ref)
            self._log.warning("a cancel is not confirmed; asking again", peer=peer, pages=pages, held_back=held)
