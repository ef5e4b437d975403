"""One attempt at a request: one decoder, one internal id, one end."""

import asyncio
from collections.abc import Callable

import msgspec
from kvferry_proto.errors import RequestError
from kvferry_proto.hashing import block_hashes
from kvferry_proto.ints import Int32s
from kvferry_proto.nodes import NodeRecord, NodeRef
from kvferry_proto.page_table import PageEntry, Source, pack
from kvferry_proto.to_decoder import Assign
from kvferry_proto.to_router import Finished

from kvferry_router.request import LastWord, Request


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt failed."""

    error: RequestError
    retry: bool
    """Another node may succeed."""
    held: bool = False
    """The decoder may still hold something of it: a Cancel must follow."""
    blame: bool = True
    """A node failed it, which the next attempt avoids; False where it lives, and was only cut off or held up."""


class StopFound(msgspec.Struct, frozen=True):
    """The answer is complete, by a stop string; the decoder does not know yet."""


End = Finished | Lost | StopFound


class Attempt:
    """Open from Assign to its end; the end comes exactly once."""

    def __init__(
        self,
        attempt_id: str,
        request: Request,
        decoder: NodeRecord,
        prefiller: NodeRecord | None,
        on_spared: Callable[[], None],
    ) -> None:
        """`on_spared` is called if the decoder does not ask the prefiller."""
        self.id = attempt_id
        self.request = request
        self.decoder = decoder
        self.prefiller = prefiller
        self.on_spared = on_spared
        self.accepted = False
        self.word: LastWord | None = None
        """What the decoder said last, if that came after the end and before this was closed."""
        self.last_token = 0
        """ns of `timeline.now`; 0 before the first token."""
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.answered = len(request.answer.token_ids)

    def finish(self, end: End) -> None:
        """Set the end; a second one changes nothing."""
        if not self.end.done():
            self.end.set_result(end)

    @property
    def held(self) -> bool:
        """Whether the decoder may still hold something of it."""
        if self.word is not None:
            return False
        # Cancelling the request cancels the future that it waits on.
        if not self.end.done() or self.end.cancelled():
            return True
        end = self.end.result()
        return end.held if isinstance(end, Lost) else isinstance(end, StopFound)

    @property
    def nodes(self) -> list[str]:
        """Names of those that take part."""
        return [node.ref.id for node in (self.decoder, self.prefiller) if node is not None]

    def culprit(self, error: RequestError) -> NodeRef:
        """Return the node to avoid after `error`: the one that the error names if it took part, else the decoder."""
        if self.prefiller is not None and error.node == self.prefiller.ref.id:
            return self.prefiller.ref
        return self.decoder.ref

    def assign(self, stop_token_ids: list[int]) -> Assign:
        """Build the message: what was already streamed goes along as if it were prompt. Raises ValueError if the
        decoder published no layout."""
        job, answered = self.request.job, self.request.answer.token_ids
        tokens = Int32s(job.tokens)
        tokens.extend(answered)
        return Assign(
            request_id=self.id,
            tokens=tokens,
            page_table=self._page_table(tokens),
            sampling=msgspec.structs.replace(job.sampling, max_tokens=self.request.answer.room),
            stop_token_ids=stop_token_ids,
            prefiller=self.prefiller.peer if self.prefiller is not None else None,
            answered=len(answered),
            cache_salt=job.cache_salt,
            grammar=job.grammar,
        )

    def _page_table(self, tokens: Int32s) -> Int32s:
        """One entry per page of the tokens but the last: that one is the first decode step's."""
        layout = self.decoder.layout
        if layout is None:
            msg = f"decoder {self.decoder.ref} published no layout"
            raise ValueError(msg)
        cached = Int32s(tokens[:-1])
        hashes = block_hashes(cached, layout.page_size, layout.model, self.request.job.cache_salt)
        hashes += [0] * (layout.pages_for(len(cached)) - len(hashes))
        source = Source.PREFILLER if self.prefiller is not None else Source.LOCAL
        return pack([PageEntry(block_hash, source) for block_hash in hashes])
