"""From what a client asked to what the dispatcher takes: prompts become tokens, settings become sampling."""

from collections.abc import Sequence
from typing import NamedTuple

from kvferry_proto.errors import ErrorCode
from kvferry_proto.grammar import Grammar
from kvferry_proto.ints import Int32s
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_router import ChatMessage

from kvferry_router.bad_request import BadRequest
from kvferry_router.chat_template import ChatTemplate, ChatTemplateError
from kvferry_router.chat_turns import Json, role_of, template_tools, template_turns
from kvferry_router.job import Job
from kvferry_router.limits import Limits
from kvferry_router.model_folder import ModelText
from kvferry_router.openai_grammar import grammar_of
from kvferry_router.openai_parse import stops
from kvferry_router.openai_sampling import check_biases, sampling_of
from kvferry_router.openai_types import ChatRequest, Common, CompletionRequest
from kvferry_router.settings import RouterSettings
from kvferry_router.tool_calls import CLOSE, OPEN
from kvferry_router.tool_choice import tools_of

COMPLETION_TOKENS = 16


class Asked(NamedTuple):
    """Fields that the two kinds of requests name differently; checked before the prompt is read."""

    tokens: int | None
    """None takes `default`."""
    default: int
    logprobs: int
    grammar: tuple[str, Grammar | None]
    """The field that asks for it, and the grammar."""
    prompt_field: str = "prompt"
    tokens_field: str = "max_tokens"
    spoken: frozenset[int] = frozenset()
    """Special tokens that the answer's text keeps."""


class JobMaker:
    """Makes jobs of requests. All methods raise BadRequest for what can't be served."""

    def __init__(self, settings: RouterSettings, text: ModelText, limits: Limits) -> None:
        self._settings = settings
        self._text = text
        self._limits = limits

    def check_model(self, name: str | None) -> None:
        """Compare with what is served; no name takes whatever that is."""
        served = self._settings.model_name
        if name not in (None, "", served):
            msg = f"the model {name!r} is not served here; {served!r} is"
            raise BadRequest(msg, "model", ErrorCode.MODEL_NOT_FOUND)

    async def completion(self, request: CompletionRequest, received: int) -> list[Job]:
        """Return one job per prompt."""
        self.check_model(request.model)
        asked = Asked(
            tokens=request.max_tokens,
            default=COMPLETION_TOKENS,
            logprobs=-1 if request.logprobs is None else request.logprobs,
            grammar=grammar_of(request),
        )
        return [self._job(request, tokens, received, asked) for tokens in await self._prompts(request.prompt)]

    async def chat(self, request: ChatRequest, received: int) -> Job:
        """Return the job of a chat."""
        self.check_model(request.model)
        tools, template = tools_of(request), self._template()
        tags = self._text.tokenizer.special((OPEN, CLOSE)) if tools else {}
        asked = Asked(
            tokens=request.max_completion_tokens or request.max_tokens,
            default=self._settings.default_chat_tokens,
            logprobs=_chat_logprobs(request),
            grammar=grammar_of(request, tags),
            prompt_field="messages",
            tokens_field="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
            spoken=frozenset(tags.values()),
        )
        turns = template_turns(request.messages, tools, native=template.takes_tools)
        tokens = await self._rendered(template, turns, template_tools(tools))
        return self._job(request, tokens, received, asked)

    async def text_tokens(self, prompt: str) -> Int32s:
        """Tokenise a prompt."""
        return await self._text.tokenizer.encode(prompt)

    async def chat_tokens(self, messages: Sequence[ChatMessage]) -> Int32s:
        """Tokenise a chat, through the model's template."""
        if not messages:
            msg = "messages is empty"
            raise BadRequest(msg, "messages")
        turns = [
            {"role": role_of(turn.role, f"messages[{index}]"), "content": turn.content}
            for index, turn in enumerate(messages)
        ]
        return await self._rendered(self._template(), turns, [])

    def _template(self) -> ChatTemplate:
        if self._text.template is None:
            msg = "this model has no chat template; use completions"
            raise BadRequest(msg, "messages")
        return self._text.template

    async def _rendered(self, template: ChatTemplate, turns: list[Json], tools: list[Json]) -> Int32s:
        try:
            text = template.render(turns, tools)
        except ChatTemplateError as error:
            raise BadRequest(str(error), "messages") from None
        return await self._text.tokenizer.encode(text, add_special_tokens=False)

    def check_ids(self, ids: Sequence[int]) -> Int32s:
        """Check a prompt given as token ids."""
        vocabulary = self._text.tokenizer.vocabulary
        for token in ids:
            if not 0 <= token < vocabulary:
                msg = f"prompt: token id {token} does not exist; the vocabulary has ids 0 to {vocabulary - 1}"
                raise BadRequest(msg, "prompt")
        return Int32s(ids)

    def make(
        self,
        tokens: Int32s,
        sampling: SamplingParams,
        stop: list[str],
        received: int,
        *,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        prompt_field: str = "prompt",
    ) -> Job:
        """Make a job of sampling settings that are complete."""
        self._limits.answer_tokens(len(tokens), sampling.max_tokens, sampling.max_tokens, prompt_field)
        check_biases((token for token, _ in sampling.logit_bias), self._text.tokenizer.vocabulary)
        return Job(
            tokens=tokens, sampling=sampling, stop=stop, grammar=grammar, cache_salt=cache_salt, received=received
        )

    def _job(self, request: Common, tokens: Int32s, received: int, asked: Asked) -> Job:
        sampling = sampling_of(
            request,
            max_tokens=self._limits.answer_tokens(
                len(tokens), asked.tokens, asked.default, asked.prompt_field, asked.tokens_field
            ),
            logprobs=asked.logprobs,
            vocabulary=self._text.tokenizer.vocabulary,
        )
        return Job(
            tokens=tokens,
            sampling=sampling,
            stop=stops(request),
            grammar=asked.grammar[1],
            grammar_field=asked.grammar[0],
            spoken=asked.spoken,
            cache_salt=request.cache_salt or "",
            received=received,
        )

    async def _prompts(self, prompt: str | list[str | int | list[int]]) -> list[Int32s]:
        match prompt:
            case str():
                return [await self.text_tokens(prompt)]
            case []:
                msg = "prompt is an empty list"
                raise BadRequest(msg, "prompt")
        if all(isinstance(item, int) for item in prompt):
            return [self.check_ids([item for item in prompt if isinstance(item, int)])]
        if len(prompt) > self._settings.max_prompts:
            msg = f"prompt holds {len(prompt)} prompts, at most {self._settings.max_prompts} are taken"
            raise BadRequest(msg, "prompt")
        texts = [item for item in prompt if isinstance(item, str)]
        lists = [item for item in prompt if isinstance(item, list)]
        if len(prompt) not in (len(texts), len(lists)):
            msg = "prompt: expected strings, or token ids, or lists of token ids, got a mixture"
            raise BadRequest(msg, "prompt")
        return [await self.text_tokens(text) for text in texts] or [self.check_ids(ids) for ids in lists]


def _chat_logprobs(request: ChatRequest) -> int:
    if request.top_logprobs is not None and not request.logprobs:
        msg = "top_logprobs needs logprobs: true"
        raise BadRequest(msg, "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else -1
