"""Where a request that must follow a grammar waits until that is compiled: before anything is reserved for it."""

import asyncio
from collections.abc import Callable

from kvferry_engine.grammar import GrammarCompiler, GrammarError
from kvferry_proto.grammar import Grammar

from kvferry_decoder.request import Request, State

MAX_COMPILING = 64
"""More are refused: the hardest grammars take half a second each."""


class GrammarDesk:
    """Compiles beside the event loop. A request leaves through `on_ready` or `on_refused`, if it has not ended."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        on_ready: Callable[[Request], None],
        on_refused: Callable[[Request, str], None],
    ) -> None:
        """`on_refused` says why the grammar can't be used."""
        self._compiler = compiler
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def full(self) -> bool:
        """Whether no more may begin."""
        return len(self._tasks) >= MAX_COMPILING

    def begin(self, request: Request, grammar: Grammar) -> None:
        """Compile for `request`, which is in COMPILING."""
        task = asyncio.ensure_future(self._prepare(request, grammar))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, request: Request, grammar: Grammar) -> None:
        try:
            matcher = await self._compiler.compile(grammar, request.stop_token_ids)
            # What another decoder had drawn under the same grammar.
            matcher.advance(request.tokens[request.prompt_length - request.answered :])
        except GrammarError as error:
            if request.state is State.COMPILING:
                self._on_refused(request, str(error))
            return
        if request.state is State.COMPILING:
            request.drawing.matcher = matcher
            self._on_ready(request)

    def close(self) -> None:
        """Forget what is being compiled."""
        for task in self._tasks:
            task.cancel()
        self._compiler.close()
