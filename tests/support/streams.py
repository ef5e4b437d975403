"""Streamed completions that run beside a test, and what every test of a cluster checks after a fault."""

import asyncio
import itertools
import json

import httpx

_SALTS = itertools.count()


class Stream:
    """One streaming completion, read by a task of its own. None of it is cached, unless a salt is given twice."""

    def __init__(self, url, prompt, tokens, **fields):
        self.tokens = []
        self.status = 0
        self.error = None
        self.finish = None
        self.usage = None
        self.timeline = None
        self.done = False
        self._news = asyncio.Event()
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body["cache_salt"] = f"stream {next(_SALTS)}"
        body |= {"stream": True, "stream_options": {"include_usage": True}} | fields
        self.task = asyncio.create_task(self._read(url, body))

    async def _read(self, url, body):
        try:
            async with (
                httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client,
                client.stream("POST", "/v1/completions", json=body) as reply,
            ):
                self.status = reply.status_code
                if reply.status_code != 200:
                    self.error = json.loads(await reply.aread())["error"]
                    return
                async for line in reply.aiter_lines():
                    self._take(line.removeprefix("data: "))
        finally:
            self._news.set()

    def _take(self, data):
        if data == "[DONE]":
            self.done = True
        elif data:
            event = json.loads(data)
            self.error = event.get("error")
            self.usage = event.get("usage") or self.usage
            self.timeline = event.get("kvferry", {}).get("timeline") or self.timeline
            for choice in event.get("choices", []):
                self.tokens += choice.get("token_ids") or []
                self.finish = choice.get("finish_reason") or self.finish
        self._news.set()

    async def until(self, count, seconds=60):
        """Wait for so many tokens, while the stream still runs."""
        async with asyncio.timeout(seconds):
            while len(self.tokens) < count:
                assert not self.task.done(), f"ended after {len(self.tokens)} tokens: {self.status} {self.error}"
                self._news.clear()
                await self._news.wait()

    async def end(self, seconds=60):
        """Wait for the end, and return the token ids of an answer that is complete."""
        await asyncio.wait_for(self.task, seconds)
        assert (self.status, self.error) == (200, None), (self.status, self.error, len(self.tokens))
        assert (self.done, self.finish) == (True, "length"), (self.done, self.finish, len(self.tokens))
        assert self.usage["completion_tokens"] == len(self.tokens), (self.usage, len(self.tokens))
        return self.tokens

    async def leave(self):
        """Close the connection."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def prompt(length, seed=0):
    """Token ids, the same for the same arguments."""
    return [100 + (seed * 7919 + index * 104_729) % 40_000 for index in range(length)]


class Golden:
    """Answers taken while all was well, to be compared with afterwards."""

    LENGTHS = (1, 8, 20, 41, 90)
    LOCAL = 9
    """Prompts of up to so many tokens are prefilled by the decoder: --local-prefill-tokens 8."""

    def __init__(self, cluster):
        self._cluster = cluster
        self.answers = self._ask()

    def _ask(self):
        return {length: self.ask(length) for length in self.LENGTHS}

    def ask(self, length):
        """Ask for one of the answers; it takes the usual way at the first attempt, and nothing of it is cached."""
        fields = {"max_tokens": 12, "ignore_eos": True, "cache_salt": f"golden {next(_SALTS)}"}
        reply = self._cluster.complete(prompt(length), **fields)
        timeline = reply["kvferry"]["timeline"]
        assert timeline["router"]["attempts"] == 1, f"{timeline}\n{self._cluster.tails()}"
        assert (timeline["prefiller"] is not None) == (length > self.LOCAL), f"{timeline}\n{self._cluster.tails()}"
        return reply["choices"][0]["token_ids"]

    def check(self):
        """Nobody holds anything, every page is free, and the answers are what they were."""
        cluster = self._cluster
        assert self._ask() == self.answers
        cluster.wait_idle()
        for node in cluster.workers:
            assert node.process.poll() is None, node.tail()
            pages = node.state()["pages"]
            assert (pages["held"], pages["quarantined"]) == (0, 0), node.name
            assert not node.events("idle, and still holding"), node.name
