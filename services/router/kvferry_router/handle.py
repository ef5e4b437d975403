"""What a front holds of a request."""

import asyncio
from collections.abc import AsyncIterator, Callable

from kvferry_router.job import Answer, Outcome, TokenEvent
from kvferry_router.request import Request


class RequestHandle:
    """Reader's end of a request."""

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self._request = request
        self._cancel = cancel
        self._told = False

    @property
    def prompt_tokens(self) -> list[int]:
        """The prompt."""
        return self._request.job.tokens.tolist()

    def cancel(self) -> None:
        """Stop; the reader then gets KvferryError with code cancelled. Nothing happens if the request is over."""
        if not self._request.over:
            self._cancel()

    async def next(self) -> TokenEvent | Outcome | None:
        """Return what came, then the outcome, then None. Raises KvferryError if the request failed.

        Everything that was streamed is returned before the failure is raised.
        """
        request = self._request
        while not self._told:
            request.changed.clear()
            event = request.answer.take()
            if event is not None:
                return event
            if request.over:
                self._told = True
                return request.result()
            await request.changed.wait()
        return None

    async def __aiter__(self) -> AsyncIterator[TokenEvent | Outcome]:
        while (item := await self.next()) is not None:
            yield item

    async def answer(self) -> Answer:
        """Wait for the whole answer, without waking up per token. Raises KvferryError."""
        request = self._request
        await request.ended.wait()
        outcome = request.result()
        event = request.answer.take() or TokenEvent(token_ids=[], text="", logprobs=[])
        return Answer(text=event.text, token_ids=event.token_ids, logprobs=event.logprobs, outcome=outcome)


async def merge(handles: list[RequestHandle]) -> AsyncIterator[tuple[int, TokenEvent | Outcome]]:
    """Yield what all of them get, with the handle's index, in order of arrival. Raises the first failure."""
    waiting = {asyncio.ensure_future(handle.next()): index for index, handle in enumerate(handles)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                item = task.result()
                if item is None:
                    continue
                waiting[asyncio.ensure_future(handles[index].next())] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
