"""What clients get back: whole answers and chunks, in the two styles of OpenAI's API."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from kvferry_proto.timeline import summary_ms
from kvferry_proto.to_router import TokenLogprobs
from kvferry_proto.usage import FinishReason, Usage

from kvferry_router.handle import RequestHandle
from kvferry_router.job import Answer, Outcome, TokenEvent
from kvferry_router.openai_logprobs import CompletionLogprobs, chat_logprobs
from kvferry_router.openai_types import ChatRequest, Common, CompletionRequest
from kvferry_router.tokenizer import Tokenizer
from kvferry_router.tool_calls import ToolCall, ToolCallParser, as_openai
from kvferry_router.tool_choice import tools_of

Json = dict[str, Any]


class Choice:
    """One answer in the style of completions."""

    def __init__(self, index: int, handle: RequestHandle, request: Common, tokenizer: Tokenizer) -> None:
        self.index = index
        self._handle = handle
        self._request = request
        self._tokenizer = tokenizer
        self._logprobs = CompletionLogprobs(tokenizer)
        self._begun = False

    def whole(self, answer: Answer) -> Json:
        """Return the answer at once."""
        body = {"text": answer.text, "logprobs": self.logprobs(answer.logprobs)}
        return self._frame(body, answer.token_ids, answer.outcome)

    def chunk(self, event: TokenEvent) -> Json | None:
        """Return a part of the answer; None if there is nothing to tell: its text is not certain yet."""
        if not (event.text or event.logprobs or self._request.return_token_ids):
            return None
        return self._frame(self.delta(event), event.token_ids, None)

    def last(self, outcome: Outcome) -> Json:
        """Return the end of the stream."""
        return self._frame(self.delta(TokenEvent(token_ids=[], text="", logprobs=[]), last=True), [], outcome)

    def delta(self, event: TokenEvent, *, last: bool = False) -> Json:  # noqa: ARG002  # chats hold text back
        """Return the part that tells what is new; `last`: nothing will follow."""
        return {"text": event.text, "logprobs": self.logprobs(event.logprobs)}

    def reason(self, outcome: Outcome) -> str:
        """Return why the answer ended."""
        return outcome.finish_reason

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> Json | None:
        """Return log probabilities, or None where none were asked for."""
        return self._logprobs.format(entries) if entries else None

    def _frame(self, body: Json, ids: Sequence[int], outcome: Outcome | None) -> Json:
        frame: Json = {"index": self.index, **body, "finish_reason": outcome and self.reason(outcome)}
        if self._request.return_token_ids:
            frame["token_ids"] = ids
            if not self._begun:
                frame["prompt_token_ids"] = self._handle.prompt_tokens
        self._begun = True
        return frame


class ChatChoice(Choice):
    """One answer in the style of chat completions."""

    def __init__(self, index: int, handle: RequestHandle, request: Common, tokenizer: Tokenizer) -> None:
        super().__init__(index, handle, request, tokenizer)
        tools = isinstance(request, ChatRequest) and tools_of(request)
        must_call = isinstance(request, ChatRequest) and request.tool_choice not in (None, "auto")
        self._calls = ToolCallParser(must_call=must_call) if tools else None

    def whole(self, answer: Answer) -> Json:
        """Return the answer at once."""
        text, calls = self._split(answer.text, last=True)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [as_openai(call, streamed=False) for call in calls]}
        body = {"message": message, "logprobs": self.logprobs(answer.logprobs)}
        return self._frame(body, answer.token_ids, answer.outcome)

    def chunk(self, event: TokenEvent) -> Json | None:
        """Return a part of the answer; None also while its text may yet be a call's."""
        chunk = super().chunk(event)
        empty = chunk is not None and not (chunk["delta"] or chunk["logprobs"] or "token_ids" in chunk)
        return None if empty else chunk

    def delta(self, event: TokenEvent, *, last: bool = False) -> Json:
        """Return the part that tells what is new; the first one names the role. A call comes when it is complete."""
        delta: Json = {} if self._begun else {"role": "assistant", "content": ""}
        text, calls = self._split(event.text, last=last)
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [as_openai(call, streamed=True) for call in calls]
        return {"delta": delta, "logprobs": self.logprobs(event.logprobs)}

    def reason(self, outcome: Outcome) -> str:
        """Return why the answer ended."""
        called = self._calls is not None and self._calls.count and outcome.finish_reason is FinishReason.STOP
        return "tool_calls" if called else outcome.finish_reason

    def _split(self, text: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        """Plain text, and calls."""
        if self._calls is None:
            return text, []
        plain, calls = self._calls.push(text)
        rest, late = self._calls.finish() if last else ("", [])
        return plain + rest, calls + late

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> Json | None:
        """Return log probabilities, or None where none were asked for."""
        return chat_logprobs(self._tokenizer, entries) if entries else None


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between the two APIs."""

    endpoint: str
    request: type[CompletionRequest] | type[ChatRequest]
    choice: type[Choice]
    prefix: str
    whole: str
    chunk: str

    def new_id(self) -> str:
        """Return an answer's id, as the client sees it."""
        return self.prefix + secrets.token_hex(12)


COMPLETIONS = Style(
    endpoint="completions",
    request=CompletionRequest,
    choice=Choice,
    prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
)
CHAT = Style(
    endpoint="chat",
    request=ChatRequest,
    choice=ChatChoice,
    prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
)


class Reply:
    """Builds the bodies of one HTTP answer."""

    def __init__(
        self,
        style: Style,
        model: str,
        tokenizer: Tokenizer,
        request: Common,
        handles: list[RequestHandle],
        *,
        answer_id: str,
        timeline: bool,
    ) -> None:
        self.choices = [style.choice(index, handle, request, tokenizer) for index, handle in enumerate(handles)]
        self._style = style
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        options = request.stream_options
        self.with_usage = options is not None and bool(options.include_usage)
        self._timeline = timeline

    def whole(self, answers: list[Answer]) -> Json:
        """Return the body of an answer that is not streamed."""
        choices = [choice.whole(answer) for choice, answer in zip(self.choices, answers, strict=True)]
        outcomes = [answer.outcome for answer in answers]
        return self._body(self._style.whole, choices) | {"usage": usage(outcomes)} | self._extra(outcomes)

    def chunk(self, choice: Json) -> Json:
        """Return the body of a chunk."""
        body = self._body(self._style.chunk, [choice])
        return body | {"usage": None} if self.with_usage else body

    def last(self, index: int, outcome: Outcome) -> Json:
        """Return the chunk that ends a choice."""
        body = self.chunk(self.choices[index].last(outcome))
        return body if self.with_usage else body | self._extra([outcome])

    def usage(self, outcomes: list[Outcome]) -> Json:
        """Return the chunk that tells what was used."""
        return self._body(self._style.chunk, []) | {"usage": usage(outcomes)} | self._extra(outcomes)

    def _body(self, kind: str, choices: list[Json]) -> Json:
        return {**self._head, "object": kind, "choices": choices}

    def _extra(self, outcomes: list[Outcome]) -> Json:
        """The field `kvferry`: an object, or a list of them if several prompts were asked at once."""
        if not self._timeline:
            return {}
        records = [record(outcome) for outcome in outcomes]
        return {"kvferry": records[0] if len(records) == 1 else records}


def record(outcome: Outcome) -> Json:
    """Return where a request's time went."""
    return {
        "request_id": outcome.request_id,
        "timeline": msgspec.to_builtins(outcome.timeline),
        "phases_ms": summary_ms(outcome.timeline),
    }


def usage(outcomes: list[Outcome]) -> Json:
    """Return the sum of what was used."""

    def total(usages: list[Usage]) -> Json:
        prompt = sum(each.prompt_tokens for each in usages)
        answer = sum(each.completion_tokens for each in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in usages)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(each.accepted_prediction_tokens for each in usages),
                "rejected_prediction_tokens": sum(each.rejected_prediction_tokens for each in usages),
            },
        }

    return total([outcome.usage for outcome in outcomes])
