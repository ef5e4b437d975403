"""A decoder's batch loop over a real model, without sockets and fabric: scheduler, step and speculation as they are."""

import asyncio
from types import SimpleNamespace

import torch
from kvferry_decoder.batch_loop import BatchLoop
from kvferry_decoder.parts import make_scheduler
from kvferry_decoder.request import Request, State
from kvferry_decoder.settings import DecoderSettings
from kvferry_decoder.speculation import Speculation
from kvferry_engine.batch import SequenceSlice
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.prefix_cache import PrefixCache
from kvferry_engine.stepping import Stepping
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_proto.ints import Int32s
from kvferry_proto.nodes import NodeRef
from kvferry_proto.sampling import SamplingParams
from kvferry_proto.to_decoder import Assign
from prometheus_client import CollectorRegistry


class RigWorker(Stepping):
    """What a batch loop needs of a worker. Pages begin full of NaN, as if left by another."""

    device, ranks, _graphs = "cpu", (), None

    def __init__(self, model, *, page_size, pages):
        self.model = model
        self.config = model.config
        self.layout = model.kv_layout(page_size)
        self.allocator = PrefixCache(pages)
        self.pool = KVPool(self.layout, pages)
        self.pool.tensor.fill_(float("nan"))
        self.max_context = min(self.config.max_positions, pages * page_size)

    async def compute(self, work):
        await asyncio.sleep(0)
        return work()


class Rig:
    """Decodes what it is asked, all at once. `speculation` takes part as it would on a node."""

    def __init__(self, model, *, page_size=4, pages=64, speculation=None, prefill_budget=16):
        self.worker = RigWorker(model, page_size=page_size, pages=pages)
        self.allocator = self.worker.allocator
        settings = DecoderSettings(
            model="none", max_running=16, max_waiting=100, prefill_budget=prefill_budget, local_prefill_tokens=0
        )
        self.scheduler = make_scheduler(self.worker, settings)
        if speculation is not None:
            self.scheduler.speculation = speculation
        self.metrics_registry = CollectorRegistry()
        self.metrics = WorkerMetrics(self.metrics_registry, lambda: None)
        self._runner = asyncio.Runner()
        self.receiving = {}
        """How pages are received: options of `receive`."""
        self.answers = {}
        self.guesses = {}
        """What the drafting layer said after each step, by request."""
        self.finished = {}
        self.failed = {}
        self._loop = BatchLoop(
            self.worker,
            self.scheduler,
            self.metrics,
            admit=self._admit,
            on_drawn=self._on_drawn,
            on_broken=self._on_failed,
            on_refused=self._on_failed,
        )

    def ask(self, prompt, *, stop=(), matcher=None, prefiller=None, **sampling):
        number = len(self.answers)
        assign = Assign(
            request_id=str(number),
            tokens=Int32s(prompt),
            page_table=Int32s(),
            sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | sampling)),
            stop_token_ids=list(stop),
            prefiller=prefiller,
        )
        request = Request.from_assign(assign, SimpleNamespace(sender=NodeRef("r", 1), key=b"r"), number)
        request.drawing.matcher = matcher
        self.answers[request.id] = []
        self.scheduler.add(request)
        return request

    def receive(self, request, chunk=5, *, with_context=True):
        """Fill a receiving request's pages as a prefiller does that knows all tokens but the last."""
        tokens, context = request.tokens[:-1], None
        for start in range(request.computed, len(tokens), chunk):
            end = min(start + chunk, len(tokens))
            following = tokens[end] if end < len(tokens) else None
            context = self.worker.hidden_states([SequenceSlice(tokens[start:end], start, request.pages, 1, following)])
        request.context = context[0] if with_context else None
        self.scheduler.arrived(request)

    def decode(self, until=lambda: False):
        """Decode until all have ended, or `until` holds after a step."""
        self._runner.run(self._decode(until))

    async def _decode(self, until):
        task = asyncio.ensure_future(self._loop.run())
        while self.scheduler.requests and not until():
            await asyncio.sleep(0)
            if task.done():
                task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def count(self, name, **labels):
        return self.metrics_registry.get_sample_value(name, labels)

    def close(self):
        self._loop.close()
        self._runner.close()
        self.worker.pool.close()

    def _admit(self):
        while admitted := self.scheduler.admit(can_receive=True):
            for request in admitted:
                if request.state is State.RECEIVING:
                    self.receive(request, **self.receiving)

    def _on_drawn(self, drawn):
        for run in drawn:
            assert len(run.tokens) >= 1
            assert len(run.logprobs) in (0, len(run.tokens))
            self.answers[run.request.id] += run.tokens
            self.guesses.setdefault(run.request.id, []).append(list(run.request.guesses))
            if run.finish is not None:
                self.finished[run.request.id] = run.finish
                self.scheduler.end(run.request, State.FINISHED)

    def _on_failed(self, request, why):
        self.failed[request.id] = why
        if not request.machine.final:
            self.scheduler.end(request, State.FAILED)


class Scripted(Speculation):
    """Drafts from a script: what the answer will be, spoilt here and there."""

    def __init__(self, most, max_context, script):
        super().__init__("ngram", most, max_context)
        self._script = script

    def _guess(self, request, most):
        return self._script(request, most)


def one_thread():
    """One thread for torch, until the end of a module: other tests want theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
