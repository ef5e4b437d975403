"""Prefiller and decoder nodes inside the test's own process: real ZeroMQ, Redis and fabric, and everything in reach."""

import asyncio
import contextlib
import itertools

from kvferry_decoder.node import DecoderNode
from kvferry_decoder.settings import DecoderSettings
from kvferry_node.channels import Post
from kvferry_node.metrics import NodeMetrics
from kvferry_node.service import Stop
from kvferry_prefiller.node import PrefillerNode
from kvferry_prefiller.settings import PrefillerSettings
from kvferry_proto.hashing import block_hashes
from kvferry_proto.ints import Int32s
from kvferry_proto.message import RequestFailed
from kvferry_proto.nodes import NodeRef, new_incarnation
from kvferry_proto.page_table import PageEntry, Source, pack
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_decoder import Assign, Cancel
from kvferry_proto.to_router import Accepted, Cancelled, Finished, FromDecoder, Tokens

SECONDS = 60


class Running:
    """A node whose main function runs as a task."""

    def __init__(self, node):
        self.node = node
        self.stop = Stop()
        self.task = asyncio.ensure_future(node.main(self.stop))

    @property
    def service(self):
        return self.node._service

    @property
    def worker(self):
        return self.node._worker

    async def ready(self):
        async with asyncio.timeout(SECONDS):
            while self.node._why_not_ready is not None:
                assert not self.task.done(), self.task.exception()
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # seen by the other's view

    async def end(self):
        self.stop.request("test")
        async with asyncio.timeout(SECONDS):
            await self.task

    async def die(self):
        """End without a word, as far as a task can: no drain, no leave; its lease runs out."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @contextlib.contextmanager
    def hold(self, seconds=None):
        """While the block runs, no forward pass begins, or each so many seconds later; the event loop goes on."""
        go, compute = asyncio.Event(), self.worker.compute

        async def held(work):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(go.wait(), seconds)
            return await compute(work)

        self.worker.compute = held
        try:
            yield
        finally:
            self.worker.compute = compute
            go.set()

    def held(self):
        return {name: count for name, count in self.service.held().items() if count}


class Asked:
    """A request as the test's router sees it."""

    def __init__(self):
        self.accepted = asyncio.Event()
        self.ended = asyncio.Event()
        self.tokens = []
        self.outcome = None


class Router:
    """Speaks to decoders as a router does."""

    def __init__(self):
        self.ref = NodeRef("test-router", new_incarnation())
        self.post = Post(self.ref, FromDecoder, self._on_message, NodeMetrics())
        self.requests = {}
        self.refused = []
        self._numbers = itertools.count()

    def ask(self, decoder, tokens, *, prefiller=None, request_id=None, answered=0, salt="", grammar=None, **sampling):
        """Send an assignment; returns what becomes of it. `answered`: how many of the tokens another has answered."""
        record = decoder.node._record(decoder.worker, decoder.service_endpoint, "")
        page_size = record.layout.page_size
        hashes = block_hashes(tokens[:-1], page_size, record.layout.model, salt)
        hashes += [0] * (record.layout.pages_for(len(tokens) - 1) - len(hashes))
        source = Source.LOCAL if prefiller is None else Source.PREFILLER
        request_id = request_id or f"test-{next(self._numbers)}"
        asked = self.requests[request_id] = Asked()
        peer = None
        if prefiller is not None:
            peer = prefiller.node._record(prefiller.worker, prefiller.service_endpoint, "").peer
        self.post.to(record.peer).send(
            Assign(
                request_id=request_id,
                tokens=Int32s(tokens),
                page_table=pack([PageEntry(block_hash, source) for block_hash in hashes]),
                sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": 4} | sampling)),
                stop_token_ids=[2],
                prefiller=peer,
                answered=answered,
                cache_salt=salt,
                grammar=grammar,
            )
        )
        asked.request_id, asked.decoder = request_id, record.peer
        return asked

    def cancel(self, asked):
        self.post.to(asked.decoder).send(Cancel(request_id=asked.request_id))

    def _on_message(self, _origin, message):
        match message:
            case Accepted():
                self.requests[message.request_id].accepted.set()
            case Tokens():
                ids = iter(message.token_ids)
                for run in message.runs:
                    self.requests[run.request_id].tokens += itertools.islice(ids, run.count)
            case Finished() | Cancelled() | RequestFailed():
                asked = self.requests[message.request_id]
                assert not asked.ended.is_set(), f"{message.request_id} ended twice"
                asked.outcome = message
                asked.ended.set()
            case _:
                self.refused.append(message)

    async def outcome(self, asked):
        async with asyncio.timeout(SECONDS):
            await asked.ended.wait()
        return asked.outcome


def settings(kind, redis_url, model, **fields):
    defaults = {
        "dtype": "float32",
        "kv_memory": 8 << 20,
        "threads": 1,
        "verify_kv": True,
        # Starting and ending a node holds up the one event loop here: shorter leases would run out.
        "lease_seconds": 4.0,
        "heartbeat_seconds": 0.3,
        "drain_seconds": 5.0,
        "page_size": 8,
        # Most of these tests are about transfers and ask the same again: nothing is to be saved there.
        "prefix_cache": False,
    }
    return kind(model=str(model), redis_url=redis_url, **(defaults | fields))


def start_prefiller(redis_url, model, **fields):
    node = PrefillerNode(settings(PrefillerSettings, redis_url, model, **fields), NodeRef("p", new_incarnation()))
    return _with_endpoint(Running(node))


def start_decoder(redis_url, model, name="d", **fields):
    node = DecoderNode(settings(DecoderSettings, redis_url, model, **fields), NodeRef(name, new_incarnation()))
    return _with_endpoint(Running(node))


def _with_endpoint(running):
    describe = running.node.describe

    def remember(record):
        running.service_endpoint = record.endpoint
        return describe(record)

    running.node.describe = remember
    return running


@contextlib.asynccontextmanager
async def pair(redis_url, model, *, prefiller=None, decoder=None, **both):
    """A prefiller and a decoder, and a router that talks to them; ended in order afterwards."""
    prefilling = start_prefiller(redis_url, model, **(both | (prefiller or {})))
    decoding = start_decoder(redis_url, model, **(both | (decoder or {})))
    router = Router()
    try:
        await prefilling.ready()
        await decoding.ready()
        yield prefilling, decoding, router
    finally:
        for running in (decoding, prefilling):
            if running.task.done():
                continue
            await running.end()
        router.post.close()
