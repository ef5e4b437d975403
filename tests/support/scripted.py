"""For tests: a decoder that answers as a script says, over real sockets and a real Redis, and a tiny model folder."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvloop
from kvferry_node.channels import Inbox, Origin
from kvferry_node.errors import ChannelError
from kvferry_node.metrics import NodeMetrics
from kvferry_node.registry import Registry
from kvferry_node.service import Stop
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.message import Message
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role, new_incarnation
from kvferry_proto.timeline import DecodeTimeline, now
from kvferry_proto.to_decoder import Assign, Cancel, ToDecoder
from kvferry_proto.to_router import Accepted, Cancelled, Finished, TokenLogprobs, TokenRun, Tokens
from kvferry_proto.usage import FinishReason, Usage
from kvferry_router.app import Router
from kvferry_router.model_folder import load_model_text
from kvferry_router.settings import RouterSettings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MODEL = "tiny"
ANSWER = "Hello wörld, the answer 🦊 is 42."
END = "<|im_end|>"
LAYOUT = KVLayout(model="tiny-weights", dtype="float32", layers=2, kv_heads=2, head_dim=8, page_size=4)
LEASE_SECONDS = 0.8
HEARTBEAT_SECONDS = 0.2
TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'refuse me' %}{{ raise_exception('no such turn') }}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["Hello world, here is the answer to your question.", "one two three four five", "the quick brown fox"]


def make_model_folder(folder: Path) -> Path:
    """Write a byte-level tokenizer with a chat template and the configuration beside it; no weights."""
    folder = folder / MODEL
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special: list[str | AddedToken] = ["<|im_start|>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id(END)
    config = {"vocab_size": vocabulary, "max_position_embeddings": 256, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return folder


Script = Callable[["ScriptedDecoder", Origin, Assign], Awaitable[None]]


class ScriptedDecoder:
    """Joins as a decoder and runs `script` for every Assign; by default it speaks `answer`, a token per step."""

    def __init__(self, redis_url: str, node_id: str, answer: list[int], script: Script | None = None) -> None:
        self.answer = answer
        self.script = script or speak
        self.assigned: list[Assign] = []
        self.cancelled: list[str] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self.confirm_cancels = True
        self.pause_at: int | None = None
        """Tokens of an answer after which `speak` waits for `go`."""
        self.go = asyncio.Event()
        self.load = Load(free_pages=1000)
        self.metrics = NodeMetrics()
        ref = NodeRef(node_id, new_incarnation())
        self.inbox = Inbox(ref, "127.0.0.1", 0, ToDecoder, self._handle, self.metrics)
        self.record = NodeRecord(
            ref=ref,
            role=Role.DECODER,
            endpoint=self.inbox.endpoint,
            model=MODEL,
            layout=LAYOUT,
            provider="tcp",
            total_pages=1000,
            max_context=256,
            max_running=64,
            max_waiting=64,
            local_prefill_tokens=4096,
        )
        self.registry = Registry(
            redis_url, "kvferry", self.record, lease_seconds=LEASE_SECONDS, heartbeat_seconds=HEARTBEAT_SECONDS
        )
        self._admitted: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> "ScriptedDecoder":
        """Join."""
        await self.registry.join()
        self._tasks = [
            asyncio.create_task(self.inbox.run()),
            asyncio.create_task(self.registry.run(lambda: self.load, self._take_admitted)),
        ]
        return self

    async def kill(self) -> None:
        """Vanish without a word: the lease has to end by itself. Safe to call twice."""
        self.inbox.close()
        tasks = [*self._tasks, *self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.registry.close()

    async def leave(self) -> None:
        """Leave the cluster."""
        await self.registry.leave()
        await self.kill()

    def admit(self, assign: Assign) -> None:
        """Count the request as accepted."""
        self._admitted.append(assign.request_id)

    def _take_admitted(self) -> list[str]:
        admitted, self._admitted = self._admitted, []
        return admitted

    def _handle(self, origin: Origin, message: Message) -> None:
        match message:
            case Assign():
                self.assigned.append(message)
                task = asyncio.ensure_future(self.script(self, origin, message))
                self.running[message.request_id] = task
                task.add_done_callback(lambda _: self.running.pop(message.request_id, None))
            case Cancel():
                self.cancelled.append(message.request_id)
                self._cancel(origin, message.request_id)

    def _cancel(self, origin: Origin, request_id: str) -> None:
        task = self.running.get(request_id)
        if task is not None:
            task.cancel()
        if self.confirm_cancels:
            origin.reply(Cancelled(request_id=request_id))


async def speak(decoder: ScriptedDecoder, origin: Origin, assign: Assign) -> None:
    """Answer with the decoder's tokens from where the request stands, up to max_tokens or the end token."""
    decoder.admit(assign)
    timeline = DecodeTimeline(assigned=now(), reserved=now(), joined=now())
    try:
        origin.reply(Accepted(request_id=assign.request_id))
        sent = 0
        for token in decoder.answer[assign.answered : assign.answered + assign.sampling.max_tokens]:
            if decoder.pause_at == assign.answered + sent:
                await decoder.go.wait()
            origin.reply(step(assign, [token]))
            sent += 1
            await asyncio.sleep(0)
        reason = FinishReason.LENGTH if sent == assign.sampling.max_tokens else FinishReason.STOP
        timeline.finished = now()
        origin.reply(finished(assign, sent, reason, timeline))
    except ChannelError:
        # The router is gone; so is the request.
        return


def step(assign: Assign, ids: list[int]) -> Tokens:
    """Build what a decode step says for one request, with log probabilities if it asked for them."""
    asked = assign.sampling.logprobs
    top = [(number, -1.0 - number) for number in range(40, 40 + max(0, asked))]
    logprobs = [TokenLogprobs(token, -0.5, top) for token in ids] if asked >= 0 else []
    return Tokens(runs=[TokenRun(assign.request_id, len(ids), logprobs)], token_ids=Int32s(ids))


def finished(assign: Assign, sent: int, reason: FinishReason, timeline: DecodeTimeline | None = None) -> Finished:
    """Build the end of an answer of `sent` tokens."""
    return Finished(
        request_id=assign.request_id,
        finish_reason=reason,
        usage=Usage(prompt_tokens=len(assign.tokens), completion_tokens=sent),
        decoder=timeline or DecodeTimeline(),
    )


@asynccontextmanager
async def running_router(redis_url: str, folder: Path, **settings: Any) -> AsyncIterator[Router]:
    """Run a router in this loop until the block ends; then drain it."""
    defaults: dict[str, Any] = {
        "http_port": 0,
        "zmq_port": 0,
        "lease_seconds": LEASE_SECONDS,
        "heartbeat_seconds": HEARTBEAT_SECONDS,
        "drain_seconds": 1.0,
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
        httpx.AsyncClient(base_url=router.url, timeout=20) as http,
    ):
        cluster = Cluster(redis_url, folder, router, http)
        try:
            yield cluster
            for decoder in cluster.decoders:
                decoder.go.set()
            await asyncio.wait_for(cluster.idle(), 10)
        finally:
            for decoder in cluster.decoders:
                await decoder.kill()


def warm_up() -> None:
    """Start the threads that libuv keeps for the whole process once something is looked up."""

    async def look_up() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.getaddrinfo("127.0.0.1", 80 + port) for port in range(16)))

    uvloop.run(look_up())
