"""How long a prompt and its answer may be."""

from collections.abc import Callable

from kvferry_proto.errors import ErrorCode
from kvferry_proto.nodes import NodeRecord

from kvferry_router.bad_request import BadRequest


def context_limit(decoders: list[NodeRecord], trained: int) -> int:
    """Return the tokens of prompt and answer together that every live decoder takes.

    `trained`: what the model folder says, or 0; it counts while no decoder is up.
    """
    limits = [limit for decoder in decoders for limit in _limits(decoder)]
    return min(limits or [trained or 1 << 31])


def _limits(decoder: NodeRecord) -> list[int]:
    return [limit for limit in (decoder.max_context, _room(decoder)) if limit]


def _room(decoder: NodeRecord) -> int:
    """Tokens that all its KV pages hold."""
    return decoder.total_pages * decoder.layout.page_size if decoder.layout is not None else 0


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
        return f"this model's context of {limit} tokens"
