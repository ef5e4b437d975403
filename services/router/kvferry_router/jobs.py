"""From what a client asked to what the dispatcher takes: prompts become tokens, settings become sampling."""

from collections.abc import Sequence

from kvferry_proto.errors import ErrorCode
from kvferry_proto.grammar import Grammar
from kvferry_proto.ints import Int32s
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_router import ChatMessage

from kvferry_router.bad_request import BadRequest
from kvferry_router.chat_template import ChatTemplateError
from kvferry_router.job import Job
from kvferry_router.limits import Limits
from kvferry_router.model_folder import ModelText
from kvferry_router.openai_grammar import grammar_of
from kvferry_router.openai_parse import stops
from kvferry_router.openai_sampling import check_biases, sampling_of
from kvferry_router.openai_types import ChatRequest, Common, CompletionRequest, Turn
from kvferry_router.settings import RouterSettings

COMPLETION_TOKENS = 16
ROLES = ("system", "developer", "user", "assistant")


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
        prompts = await self._prompts(request.prompt)
        logprobs = -1 if request.logprobs is None else request.logprobs
        return [
            self._job(request, tokens, received, logprobs=logprobs, asked=request.max_tokens, default=COMPLETION_TOKENS)
            for tokens in prompts
        ]

    async def chat(self, request: ChatRequest, received: int) -> Job:
        """Return the job of a chat."""
        self.check_model(request.model)
        tokens = await self.chat_tokens([_message(turn, index) for index, turn in enumerate(request.messages)])
        asked = request.max_completion_tokens or request.max_tokens
        logprobs, default = _chat_logprobs(request), self._settings.default_chat_tokens
        return self._job(request, tokens, received, logprobs=logprobs, asked=asked, default=default)

    async def text_tokens(self, prompt: str) -> Int32s:
        """Tokenise a prompt."""
        return await self._text.tokenizer.encode(prompt)

    async def chat_tokens(self, messages: Sequence[ChatMessage]) -> Int32s:
        """Tokenise a chat, through the model's template."""
        if self._text.template is None:
            msg = "this model has no chat template; use completions"
            raise BadRequest(msg, "messages")
        if not messages:
            msg = "messages is empty"
            raise BadRequest(msg, "messages")
        turns = [{"role": _role(turn.role, index), "content": turn.content} for index, turn in enumerate(messages)]
        try:
            text = self._text.template.render(turns)
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
    ) -> Job:
        """Make a job of sampling settings that are complete."""
        self._limits.answer_tokens(len(tokens), sampling.max_tokens, sampling.max_tokens)
        check_biases((token for token, _ in sampling.logit_bias), self._text.tokenizer.vocabulary)
        return Job(
            tokens=tokens, sampling=sampling, stop=stop, grammar=grammar, cache_salt=cache_salt, received=received
        )

    def _job(
        self, request: Common, tokens: Int32s, received: int, *, logprobs: int, asked: int | None, default: int
    ) -> Job:
        sampling = sampling_of(
            request,
            max_tokens=self._limits.answer_tokens(len(tokens), asked, default),
            logprobs=logprobs,
            vocabulary=self._text.tokenizer.vocabulary,
        )
        return Job(
            tokens=tokens,
            sampling=sampling,
            stop=stops(request),
            grammar=grammar_of(request),
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


def _role(role: str, index: int) -> str:
    """Return the role as templates know it."""
    if role not in ROLES:
        where = f"messages[{index}].role"
        msg = f"{where}: expected one of {', '.join(ROLES)}, got {role[:40]!r}"
        raise BadRequest(msg, where)
    return "system" if role == "developer" else role


def _message(turn: Turn, index: int) -> ChatMessage:
    where = f"messages[{index}]"
    if isinstance(turn.content, str):
        return ChatMessage(role=turn.role, content=turn.content)
    if turn.content is None:
        msg = f"{where}.content is missing; tool calls are not supported"
        raise BadRequest(msg, f"{where}.content")
    for part in turn.content:
        if part.type != "text" or part.text is None:
            msg = f"{where}.content: only parts of type text are supported, got {part.type!r}"
            raise BadRequest(msg, f"{where}.content")
    return ChatMessage(role=turn.role, content="".join(part.text or "" for part in turn.content))


def _chat_logprobs(request: ChatRequest) -> int:
    if request.top_logprobs is not None and not request.logprobs:
        msg = "top_logprobs needs logprobs: true"
        raise BadRequest(msg, "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else -1
