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
    pages = decoder.total_pages * decoder.layout.page_size if decoder.layout is not None else 0
    return [limit for limit in (decoder.max_context, pages) if limit]


class Limits:
    """Checks lengths against what the cluster can do right now."""

    def __init__(self, decoders: Callable[[], list[NodeRecord]], trained: int) -> None:
        self._decoders = decoders
        self._trained = trained

    def answer_tokens(self, prompt: int, asked: int | None, default: int, param: str = "max_tokens") -> int:
        """Return how many tokens the answer may have. Raises BadRequest.

        prompt, asked, default: tokens; `asked` is what the client set, `default` is cut to the room that is left.
        """
        limit = context_limit(self._decoders(), self._trained)
        if prompt < 1:
            msg = "the prompt is empty: at least one token is needed"
            raise BadRequest(msg, "prompt")
        if prompt >= limit:
            msg = (
                f"the prompt has {prompt} tokens, and this model's context of {limit} tokens must hold it and at least "
                f"one token of the answer ({param}: {asked or default})"
            )
            raise BadRequest(msg, "prompt", ErrorCode.PROMPT_TOO_LONG)
        if asked is not None and prompt + asked > limit:
            msg = (
                f"the prompt has {prompt} tokens and {param} is {asked}: {prompt + asked} together, and this model's "
                f"context has {limit} tokens"
            )
            raise BadRequest(msg, param, ErrorCode.PROMPT_TOO_LONG)
        return asked if asked is not None else min(default, limit - prompt)
