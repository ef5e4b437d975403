"""What a client may ask for, in the words of the library, turned into a `Generate` message."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from kvferry_proto.grammar import Grammar
from kvferry_proto.ints import Int32s
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_router import ChatMessage, Generate

from kvferry.errors import bad_request

Turn = ChatMessage | Mapping[str, str]


class Ask(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; what is left out takes the protocol's default."""

    messages: Sequence[Turn]
    """Turns of a chat, each a ChatMessage or {"role": ..., "content": ...}; instead of a prompt."""
    prompt_ids: Iterable[int]
    """Token ids; instead of a prompt."""
    model: str
    """Name of the model; "" takes whatever is served."""
    stop: Sequence[str]
    """Texts that end the answer; at most 16."""
    grammar: Grammar
    """What the answer must look like: Grammar.json_schema({...}), Grammar.regex(...), Grammar.choice([...])."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    """Token id to what is added to its logit."""
    seed: int
    max_tokens: int
    logprobs: int
    """-1: none; 0: of the chosen token; n: of the n likeliest beside it."""
    ignore_eos: bool
    cache_salt: str
    """Cached KV is shared only between requests with the same one: give each tenant its own."""


_SAMPLING = frozenset(SamplingParams.__struct_fields__)
_OTHER = frozenset({"messages", "prompt_ids", "model", "stop", "cache_salt", "grammar"})


def to_generate(request_id: str, prompt: str | None, ask: Ask) -> Generate:
    """Build the message. Raises BadRequest for what can't be put in one; values are checked when it is encoded."""
    unknown = set(ask) - _SAMPLING - _OTHER
    if unknown:
        msg = f"unknown argument {', '.join(sorted(unknown))}"
        raise bad_request(msg)
    messages, ids = ask.get("messages"), ask.get("prompt_ids")
    given = sum(part is not None for part in (prompt, messages, ids))
    if given != 1:
        msg = f"give exactly one of prompt, messages and prompt_ids, not {given}"
        raise bad_request(msg)
    return Generate(
        id=request_id,
        model=ask.get("model", ""),
        prompt=prompt,
        messages=None if messages is None else [_turn(turn) for turn in messages],
        prompt_ids=None if ids is None else _ids(ids),
        sampling=_sampling(ask),
        stop=_stops(ask.get("stop", ())),
        cache_salt=ask.get("cache_salt", ""),
        grammar=ask.get("grammar"),
    )


def _sampling(ask: Ask) -> SamplingParams:
    fields = {name: value for name, value in ask.items() if name in _SAMPLING}
    if "logit_bias" in ask:
        fields["logit_bias"] = _biases(ask["logit_bias"])
    return SamplingParams(**fields)  # type: ignore[arg-type]  # checked on encoding


def _biases(biases: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(biases, Mapping):
        msg = f"logit_bias maps token ids to biases, it is no {type(biases).__name__}"
        raise bad_request(msg)
    return tuple(biases.items())


def _turn(turn: Turn) -> ChatMessage:
    if isinstance(turn, ChatMessage):
        return turn
    if not isinstance(turn, Mapping) or set(turn) != {"role", "content"}:
        msg = f"a chat message has the keys role and content, not {turn!r}"
        raise bad_request(msg)
    return ChatMessage(role=turn["role"], content=turn["content"])


def _ids(ids: Iterable[int]) -> Int32s:
    try:
        return Int32s(ids)
    except (TypeError, OverflowError) as error:
        msg = f"prompt_ids are 32-bit integers: {error}"
        raise bad_request(msg) from None


def _stops(stop: Sequence[str]) -> list[str]:
    # A bare string is a sequence of one-letter strings, which nobody means.
    return [stop] if isinstance(stop, str) else list(stop)
