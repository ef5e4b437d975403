"""The bodies that clients send, as far as this router knows them.

Fields of these structs are supported. `UNSUPPORTED` names fields that would change the answer and aren't: anything
but the values listed there is refused. All other fields (user, metadata, store, ...) are ignored.
"""

from typing import Annotated, Any, Literal

import msgspec
from kvferry_proto.message import CacheSalt
from kvferry_proto.sampling import MAX_BIASED_TOKENS, MAX_TOP_LOGPROBS, Bias, Fraction, Penalty, Repetition

MAX_STOPS = 16
MAX_TOOLS = 128
MAX_STOP_CHARACTERS = 256

Positive = Annotated[int, msgspec.Meta(ge=1)]
Top = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]


FunctionName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class StreamOptions(msgspec.Struct, frozen=True):
    """How to stream."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """A named schema. Whatever `strict` says, the answer follows it."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """What the answer must look like, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """What the answer must look like, in vLLM's words: one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of requests take; None stands for the default, as OpenAI has it."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)] | None = None
    """Extension; 0 and -1 take all."""
    min_p: Fraction | None = None
    """Extension."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    """Extension."""
    logit_bias: Annotated[dict[str, Bias], msgspec.Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    """Token id, written as a string, to bias."""
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """Extension, as the guided_ fields are: other servers' names for the same."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    ignore_eos: bool | None = None
    """Extension."""
    cache_salt: CacheSalt | None = None
    """Extension: cached KV is shared only between requests with the same one."""
    return_token_ids: bool | None = None
    """Extension: token_ids per choice, and prompt_token_ids."""
    kvferry_timeline: bool | None = None
    """Extension: the request's time line in the field `kvferry`."""


class CompletionRequest(Common, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: Top | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """What an earlier turn called."""

    name: str
    arguments: str = "{}"
    """JSON text."""


class EarlierCall(msgspec.Struct, frozen=True):
    """A tool call of an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Turn(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; None takes any object."""
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


_NOTHING: tuple[Any, ...] = (None,)
_OFF: tuple[Any, ...] = (None, False)
_EMPTY_LIST: tuple[Any, ...] = (None, [])
_ZERO: tuple[Any, ...] = (None, 0)
_ONE: tuple[Any, ...] = (None, 1)

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "n": _ONE,
    "best_of": _ONE,
    "echo": _OFF,
    "suffix": (None, ""),
    "tools": _EMPTY_LIST,
    "tool_choice": (None, "none", "auto"),
    "functions": _EMPTY_LIST,
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": _NOTHING,
    "web_search_options": _NOTHING,
    "reasoning_effort": (None, "none"),
    # Extensions of other servers
    "min_tokens": _ZERO,
    "length_penalty": _ONE,
    "use_beam_search": _OFF,
    "stop_token_ids": _EMPTY_LIST,
    "bad_words": _EMPTY_LIST,
    "prompt_logprobs": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "skip_special_tokens": (None, True),
    "include_stop_str_in_output": _OFF,
    "add_generation_prompt": (None, True),
    "continue_final_message": _OFF,
    "chat_template": _NOTHING,
    "chat_template_kwargs": (None, {}),
    "documents": _EMPTY_LIST,
}
