"""Grammars: which tokens may come next. A thin, bounded layer over llguidance.

A `GrammarCompiler` turns a grammar's text into a `Matcher` in a thread of its own; a `Masker` asks all matchers of a
step for their allowed tokens in another one, while the forward pass runs; `TokenMasks.apply` takes the others out of
the step's logits at once. llguidance bounds its own work by counted steps ("fuel"), not by time: whatever goes beyond
is an error of that grammar alone.
"""

import asyncio
import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import llguidance
import numpy as np
import torch
from kvferry_proto.grammar import WHITESPACE, Grammar, GrammarKind
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from kvferry_engine.end_tokens import end_tokens
from kvferry_engine.grammar_divisors import too_many_remainders

CACHED_GRAMMARS = 64
MASK_THREADS = 2
# The hardest grammars then take about half a second of one core to compile.
LEXER_FUEL = 500_000
GRAMMAR_SIZE = 200_000
LEXER_STATES = 50_000
STACK_BYTES = 256 << 20
"""Of the thread that compiles: address space. llguidance follows rules and references by recursion, thousands deep in
the longest grammars, and the usual 8 MiB ended the process. None was seen to need 64."""


class GrammarError(ValueError):
    """The grammar can't be used; the text says why, in the words of the client."""


class Matcher:
    """One answer's place in its grammar. One thread at a time.

    Speculation: `takes` tells how many draft tokens `advance` will take, and `rollback` takes back those that the model
    rejected.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def native(self) -> llguidance.LLMatcher:
        """The library's object, for `Masker`."""
        return self._matcher

    @property
    def complete(self) -> bool:
        """Nothing can follow: the answer is whole, or an end token was taken."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def failure(self) -> str:
        """Why no mask can be given any more; "" while all is well."""
        return _reason(self._matcher.get_error())

    def copy(self) -> "Matcher":
        """A matcher of its own at the same place."""
        return Matcher(self._matcher.deep_copy())

    def fits(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, may come next. Changes nothing."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def takes(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, `advance` takes one after the other. Changes nothing.

        May be fewer than fit: following a grammar has limits that validation does not know, and ends when it is whole.
        """
        trial, fitting = self._matcher.deep_copy(), self.fits(tokens)
        return next((n for n, token in enumerate(tokens[:fitting]) if not trial.consume_tokens([token])), fitting)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take `tokens`. Raises GrammarError if they don't follow the grammar."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarError(self.failure)

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back. Raises GrammarError if there are not so many."""
        if not self._matcher.rollback(count):
            raise GrammarError(self.failure)


@functools.lru_cache(maxsize=4)
def make_tokenizer(text: str, vocabulary: int, ends: frozenset[int]) -> llguidance.LLTokenizer:
    """Read a tokenizer.json. Takes about 0.3 s for 50,000 tokens, in which no other thread of Python runs."""
    return llguidance.LLTokenizer(text, n_vocab=vocabulary, eos_token=sorted(ends))


@functools.lru_cache(maxsize=4)
def folder_tokenizer(folder: Path, vocabulary: int, ends: frozenset[int]) -> llguidance.LLTokenizer:
    """Return a model folder's tokenizer; models that share one share it. Raises OSError or ValueError."""
    return make_tokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"), vocabulary, ends)


def read_ahead(folder: Path, vocabulary: int) -> None:
    """Read the tokenizer of a model folder while there is nothing yet that this could hold up.

    Raises OSError, ValueError or ModelError: no grammar can be used then.
    """
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    folder_tokenizer(folder, vocabulary, end_tokens(folder, text))


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, off the event loop; the latest are kept."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`folder`: the model's; its tokenizer.json is read with the first grammar, if not by `read_ahead`."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._thread = _deep_thread()
        self._compiled: OrderedDict[tuple[Grammar, frozenset[int]], Matcher | GrammarError] = OrderedDict()

    async def compile(self, grammar: Grammar, ends: frozenset[int]) -> Matcher:
        """Return a matcher at the beginning. `ends`: tokens that may come where the grammar is satisfied.

        Raises GrammarError.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.compile_now, grammar, ends)

    def compile_now(self, grammar: Grammar, ends: frozenset[int]) -> Matcher:
        """Compile in this thread; not for two at once. Raises GrammarError."""
        key = (grammar, ends)
        if key not in self._compiled:
            self._compiled[key] = self._build(grammar, ends)
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        # What can't be compiled is kept too: it takes longest, and is asked again.
        found = self._compiled[key]
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found.copy()

    def _build(self, grammar: Grammar, ends: frozenset[int]) -> Matcher | GrammarError:
        try:
            source = _source(grammar)
            matcher = Matcher(llguidance.LLMatcher(self._tokenizer(ends), source, limits=_limits(), log_level=0))
        except (ValueError, GrammarError) as error:
            return GrammarError(f"the {grammar.kind} can't be used: {_reason(str(error))}")
        if matcher.failure:
            return GrammarError(f"the {grammar.kind} can't be used: {matcher.failure}")
        return matcher

    def _tokenizer(self, ends: frozenset[int]) -> llguidance.LLTokenizer:
        try:
            return folder_tokenizer(self._folder, self._vocabulary, ends)
        except OSError as error:
            msg = f"this decoder can't read its tokenizer: {error.strerror}"
            raise GrammarError(msg) from None

    def close(self) -> None:
        """End the thread; what is being compiled is waited for."""
        self._thread.shutdown()


def _deep_thread() -> ThreadPoolExecutor:
    """Start the thread that compiles. It must be there before the usual size is set again, which is the process's."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    usual = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int).result()
    finally:
        threading.stack_size(usual)
    return pool


class TokenMasks(NamedTuple):
    """What the rows that have a grammar must not draw."""

    rows: torch.Tensor
    """Their indices among the step's rows of logits, int64 [G]."""
    forbidden: torch.Tensor
    """bool [G, V]."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy of `logits` [B, V] with minus infinity for what is forbidden."""
        forbidden = self.forbidden.to(logits.device)
        if len(self.rows) == len(logits):
            return logits.masked_fill(forbidden, float("-inf"))
        rows = self.rows.to(logits.device)
        return logits.index_copy(0, rows, logits[rows].masked_fill_(forbidden, float("-inf")))


class Masker:
    """Asks matchers for masks, in a thread beside the forward pass."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, matchers: Sequence[tuple[int, Matcher]]) -> "Future[TokenMasks] | None":
        """Begin with the masks of (row of logits, matcher); None for nothing to do."""
        return self._thread.submit(self.fill, matchers) if matchers else None

    def fill(self, matchers: Sequence[tuple[int, Matcher]]) -> TokenMasks:
        """Compute the masks in this thread."""
        packed = allocate_token_bitmask(len(matchers), self._vocabulary)
        asked = [(matcher.native, place) for place, (_, matcher) in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, asked, packed)
        rows = torch.tensor([row for row, _ in matchers], dtype=torch.int64)
        bits = np.unpackbits(~packed.view(np.uint8), axis=1, count=self._vocabulary, bitorder="little")
        return TokenMasks(rows, torch.from_numpy(bits.view(bool)))

    @functools.cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor(num_threads=MASK_THREADS)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _source(grammar: Grammar) -> str:
    if wrong := too_many_remainders(grammar.text):
        raise GrammarError(wrong)
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return str(
                llguidance.LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": WHITESPACE})
            )
        case GrammarKind.REGEX:
            return str(llguidance.LLMatcher.grammar_from_regex(grammar.text))
        case GrammarKind.LARK:
            return str(llguidance.LLMatcher.grammar_from_lark(grammar.text))


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL, max_grammar_size=GRAMMAR_SIZE, max_lexer_states=LEXER_STATES
    )


def _reason(text: str) -> str:
    """The library's error without its drawings; what is wrong with a regular expression stands below the first line."""
    head, _, rest = text.strip().partition("\n")
    below = [line.removeprefix("error: ") for line in rest.split("\n") if line.startswith("error: ")]
    return " ".join([head[:240], *below])[:400]
