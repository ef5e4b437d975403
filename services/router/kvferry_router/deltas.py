"""What has gathered for a client that reads slowly, in pieces that can be sent."""

from collections.abc import Iterator

from kvferry_proto.ints import Int32s
from kvferry_proto.to_client import Delta

from kvferry_router.job import TokenEvent

TOKENS = 256
"""In a Delta at most. With twenty log probabilities each they fill a fifth of what a message's header may hold."""
CHARACTERS = 64 * 1024
"""In a Delta at most; as JSON none takes more than six bytes."""


def deltas(name: str, event: TokenEvent) -> Iterator[Delta]:
    """Yield what came, for the request that its client calls `name`: one Delta, or several of what is too much for it.

    Text may lag behind the ids, and not the other way round: it comes with the last of them.
    """
    ids, logprobs, text = event.token_ids, event.logprobs, event.text
    last = max(0, len(ids) - 1) // TOKENS * TOKENS
    for start in range(0, last, TOKENS):
        part = slice(start, start + TOKENS)
        yield Delta(id=name, text="", token_ids=Int32s(ids[part]), logprobs=logprobs[part])
    yield Delta(id=name, text=text[:CHARACTERS], token_ids=Int32s(ids[last:]), logprobs=logprobs[last:])
    for start in range(CHARACTERS, len(text), CHARACTERS):
        yield Delta(id=name, text=text[start : start + CHARACTERS], token_ids=Int32s())
