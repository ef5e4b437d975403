"""For tests: a router in this process, its scripted decoders, and an HTTP client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvloop
from kvferry_node.service import Stop
from kvferry_proto.nodes import Load
from kvferry_router.app import Router
from kvferry_router.model_folder import load_model_text
from kvferry_router.settings import RouterSettings
from scripted import ANSWER, HEARTBEAT_SECONDS, LEASE_SECONDS, Script, ScriptedDecoder
from text_folder import MODEL


@asynccontextmanager
async def running_router(redis_url: str, folder: Path, **settings: Any) -> AsyncIterator[Router]:
    """Run a router in this loop until the block ends; then drain it."""
    defaults: dict[str, Any] = {
        "http_port": 0,
        "zmq_port": 0,
        "lease_seconds": LEASE_SECONDS,
        "heartbeat_seconds": HEARTBEAT_SECONDS,
        "drain_seconds": 1.0,
        "recovery_seconds": 0.5,
    }
    options = RouterSettings(model=str(folder), redis_url=redis_url, **(defaults | settings))
    router = Router(options, load_model_text(folder))
    stop = Stop()
    task = asyncio.create_task(router.run(stop))
    started = asyncio.create_task(router.started.wait())
    await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    try:
        yield router
    finally:
        stop.request("the test is over")
        await task


class Cluster:
    """A router, its decoders, and an HTTP client."""

    def __init__(self, redis_url: str, folder: Path, router: Router, http: httpx.AsyncClient) -> None:
        self.text = load_model_text(folder)
        self.router = router
        self.http = http
        self.decoders: list[ScriptedDecoder] = []
        self._redis_url = redis_url

    def tokens(self, what: str = ANSWER) -> list[int]:
        """Tokens of a text and the end token: what a decoder says."""
        return [*self.encode(what), *self.text.stop_token_ids]

    def encode(self, what: str) -> list[int]:
        """Tokens of a short text."""
        return list(self.text.tokenizer.encode_now(what))

    async def decoder(
        self, node_id: str = "d1", script: Script | None = None, answer: str = ANSWER, **load: int
    ) -> ScriptedDecoder:
        """Start a decoder and wait until the router sees it."""
        decoder = ScriptedDecoder(self._redis_url, node_id, self.tokens(answer), script)
        decoder.load = Load(**({"free_pages": 1000} | load))
        self.decoders.append(await decoder.start())
        await self.until(lambda state: state["decoders"] >= len({each.record.ref.id for each in self.decoders}))
        return decoder

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the router's state is as wished; the test's own timeout is the bound."""
        while not holds(await self.state()):  # noqa: ASYNC110  # nothing here can set an event
            await asyncio.sleep(0.02)

    async def state(self) -> dict[str, Any]:
        """What /state says."""
        state: dict[str, Any] = (await self.http.get("/state")).json()
        return state

    async def idle(self) -> None:
        """Wait until the router holds nothing."""
        await self.until(lambda state: not any(state["held"].values()))

    async def metric(self, name: str) -> float:
        """Sum of the samples whose line begins with `name`."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def complete(self, status: int = 200, path: str = "/v1/completions", **body: Any) -> Any:
        """Ask, check the status, return the body."""
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        prompt = chat if "chat" in path else {"prompt": "one two"}
        answer = await self.http.post(path, json={"model": MODEL, "max_tokens": 100} | prompt | body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def events(self, path: str = "/v1/completions", **body: Any) -> list[str]:
        """Ask for a stream and return its data lines."""
        json_body = {"model": MODEL, "max_tokens": 100, "stream": True} | body
        async with self.http.stream("POST", path, json=json_body) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return [line[6:] async for line in answer.aiter_lines() if line]


@asynccontextmanager
async def running_cluster(redis_url: str, folder: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """Run a router without decoders; at the end nothing may be held by it."""
    async with (
        running_router(redis_url, folder, **settings) as router,
        httpx.AsyncClient(base_url=router.url, timeout=60) as http,
    ):
        cluster = Cluster(redis_url, folder, router, http)
        try:
            yield cluster
            for decoder in cluster.decoders:
                decoder.go.set()
            await asyncio.wait_for(cluster.idle(), 60)
        finally:
            for decoder in cluster.decoders:
                await decoder.kill()


def warm_up() -> None:
    """Start the threads that libuv keeps for the whole process once something is looked up."""

    async def look_up() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.getaddrinfo("127.0.0.1", 80 + port) for port in range(16)))

    uvloop.run(look_up())
