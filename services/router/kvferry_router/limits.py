"""How long a prompt and its answer may be."""

from collections.abc import Callable

from kvferry_proto.codec import MAX_FRAME_BYTES
from kvferry_proto.errors import ErrorCode
from kvferry_proto.nodes import NodeRecord
from kvferry_proto.page_table import ENTRY_INTS

from kvferry_router.bad_request import BadRequest

MESSAGE_TOKENS = MAX_FRAME_BYTES // 4
"""Token ids that a message carries: an Assign has the prompt, and a replay's what was answered too."""


def context_limit(decoders: list[NodeRecord], trained: int) -> int:
    """Return the tokens of prompt and answer together that every live decoder takes, and a message carries.

    `trained`: what the model folder says, or 0; it counts while no decoder is up.
    """
    limits = [limit for decoder in decoders for limit in _limits(decoder)]
    return min(MESSAGE_TOKENS, *(limits or [trained or MESSAGE_TOKENS]))


def _limits(decoder: NodeRecord) -> list[int]:
    return [limit for limit in (decoder.max_context, _room(decoder), _table_room(decoder)) if limit]


def _room(decoder: NodeRecord) -> int:
    """Tokens that all its KV pages hold."""
    return decoder.total_pages * decoder.layout.page_size if decoder.layout is not None else 0


def _table_room(decoder: NodeRecord) -> int:
    """Tokens whose page table a message carries; beyond MESSAGE_TOKENS but for the smallest pages."""
    pages = MAX_FRAME_BYTES // (4 * ENTRY_INTS)
    return pages * decoder.layout.page_size if decoder.layout is not None else 0


class Limits:
    """Checks lengths against what the cluster can do right now."""

    def __init__(self, decoders: Callable[[], list[NodeRecord]], trained: int) -> None:
        self._decoders = decoders
        self._trained = trained

    def answer_tokens(
        self,
        prompt: int,
        asked: int | None,
        default: int,
        prompt_field: str = "prompt",
        tokens_field: str = "max_tokens",
    ) -> int:
        """Return how many tokens the answer may have. Raises BadRequest.

        prompt, asked, default: tokens; `asked` is what the client set, `default` is cut to the room that is left.
        prompt_field, tokens_field: what the client calls its prompt, and what it asks for.
        """
        limit = context_limit(self._decoders(), self._trained)
        if prompt < 1:
            msg = "the prompt is empty: at least one token is needed"
            raise BadRequest(msg, prompt_field)
        if prompt >= limit:
            msg = (
                f"the prompt has {prompt} tokens, and {self._holder(limit)} must hold it and at least one token of the "
                f"answer ({tokens_field}: {asked or default})"
            )
            raise BadRequest(msg, prompt_field, ErrorCode.PROMPT_TOO_LONG)
        if asked is not None and prompt + asked > limit:
            msg = (
                f"the prompt has {prompt} tokens and {tokens_field} is {asked}: {prompt + asked} together, and "
                f"{self._holder(limit)} must hold them"
            )
            raise BadRequest(msg, tokens_field, ErrorCode.PROMPT_TOO_LONG)
        return asked if asked is not None else min(default, limit - prompt)

    def _holder(self, limit: int) -> str:
        """What it is that ends at `limit` tokens. Decoders' `max_context` is cut to their pages already."""
        if limit < self._trained and limit in map(_room, self._decoders()):
            return f"a decoder's KV memory of {limit} tokens (--kv-memory; this model's own context is {self._trained})"
        if limit != self._trained and limit in (MESSAGE_TOKENS, *map(_table_room, self._decoders())):
            return f"a message between nodes, of at most {limit} tokens,"
        return f"this model's context of {limit} tokens"
