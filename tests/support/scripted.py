"""For tests: a decoder that answers as a script says, over real sockets and a real Redis."""

import asyncio
from collections.abc import Awaitable, Callable

from kvferry_node.channels import Inbox, Origin
from kvferry_node.errors import ChannelError
from kvferry_node.metrics import NodeMetrics
from kvferry_node.registry import Registry
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.message import Message
from kvferry_proto.nodes import Load, NodeRecord, NodeRef, Role, new_incarnation
from kvferry_proto.timeline import DecodeTimeline, now
from kvferry_proto.to_decoder import Assign, Cancel, ToDecoder
from kvferry_proto.to_router import Accepted, Cancelled, Finished, TokenLogprobs, TokenRun, Tokens
from kvferry_proto.usage import FinishReason, Usage
from text_folder import MODEL

ANSWER = "Hello wörld, the answer 🦊 is 42."
LAYOUT = KVLayout(model="tiny-weights", dtype="float32", layers=2, kv_heads=2, head_dim=8, page_size=4)
LEASE_SECONDS = 2.0
"""A busy machine must not let a living node's lease end."""
HEARTBEAT_SECONDS = 0.2
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
            origin.reply(Cancelled(request_id=request_id, decoder=DecodeTimeline(assigned=now(), joined=now())))


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
