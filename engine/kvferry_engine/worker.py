"""What a node that runs the model owns: ranks, weights, KV pools, page book, transfer engine, threads to compute in."""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from kvferry_fabric import LayerCounter, MemoryRegion, TransferEngine
from kvferry_node.logs import get_logger
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRef

from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.checksums import Place, page_checksums
from kvferry_engine.config import ModelConfig
from kvferry_engine.context_slots import ContextSlots
from kvferry_engine.decode_graphs import DecodeGraphs, can_capture
from kvferry_engine.device_counter import DeviceCounter
from kvferry_engine.devices import on_gpu, resolve
from kvferry_engine.fabric_cpus import fabric_cpus
from kvferry_engine.kv_place import in_gpu
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.kv_size import enough_pages
from kvferry_engine.models.base import Model, OnLayer
from kvferry_engine.prefix_cache import PrefixCache
from kvferry_engine.ranks.errors import RankLostError
from kvferry_engine.ranks.processes import RankProcesses
from kvferry_engine.ranks.steps import Step, Work
from kvferry_engine.shard import ALONE, Shard
from kvferry_engine.weights import Progress, load_model
from kvferry_engine.worker_settings import WorkerSettings

T = TypeVar("T")

# Faults that the fabric injects by itself, and what its numbers mean there.
_FABRIC_FAULTS = {"corrupt-write": ("corrupt", 1), "delay-write-ms": ("delay", 1_000_000), "fail-write": ("fail", 1)}
_MODEL_FAULTS = {"slow-layer-ms"}


class Worker:
    """Opened once per node, in its lead process, closed after the service has drained. The event loop's thread owns
    all but what runs in `compute` and `checksums`."""

    def __init__(
        self,
        settings: WorkerSettings,
        ref: NodeRef,
        ranks: RankProcesses | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Load the model and open the fabric, which takes seconds.

        `ranks` are those that `settings.tp` asks for beside this process, and belong to the worker from now on.
        Raises ValueError, OSError, EngineError or FabricError.
        """
        torch.set_num_threads(settings.rank_threads)
        self.settings = settings
        self.ranks = ranks or RankProcesses()
        if len(self.ranks) != settings.tp - 1:
            msg = f"--tp {settings.tp} takes {settings.tp - 1} processes beside the lead, {len(self.ranks)} are there"
            raise ValueError(msg)
        self.config = ModelConfig.from_folder(Path(settings.model))
        self._devices = resolve(settings.device, settings.tp)
        self.device = self._devices[0]
        """Where this rank computes, as torch says it."""
        self._in_gpu = in_gpu(settings, self.device)
        self.fabric = TransferEngine(
            settings.provider,
            incarnation=ref.incarnation,
            domains=settings.fabric_hosts,
            trace=bool(settings.fault),
            cpus=fabric_cpus(settings),
            device_memory=self._in_gpu,
        )
        try:
            self._open(settings, progress)
        except BaseException:
            self.fabric.close()
            raise

    def _open(self, settings: WorkerSettings, progress: Progress | None) -> None:
        self._inject(settings.faults)
        if self.fabric.provider == "shm":
            get_logger().warning("over shm a node that is killed can hang others for good", advice="--provider local")
        shard = Shard(0, settings.tp, self.ranks.join()) if settings.tp > 1 else ALONE
        self.model: Model = load_model(
            Path(settings.model),
            settings.dtype,
            device=self.device,
            attention=settings.attention,
            shard=shard,
            progress=progress,
        )
        self.layout: KVLayout = self.model.kv_layout(settings.page_size)
        pages = enough_pages(self.layout, settings.kv_memory)
        self.pool = KVPool(self.layout, pages, device=self.device, huge=settings.huge_pages, in_gpu=self._in_gpu)
        get_logger().info(
            "KV pool", pages=pages, bytes=pages * self.layout.page_bytes * self.layout.layers, memory=self.pool.backing
        )
        others = self._devices[1:] if self._in_gpu else None
        self.pools = [self.pool, *self.ranks.receive_pools(self.layout, self.pool.pages, others)]
        """KV pools of all ranks; pages have the same numbers in each."""
        self.allocator = PrefixCache(self.pool.pages, enabled=settings.prefix_cache)
        self._contexts: list[ContextSlots] = []
        self._graphs = self._open_graphs() if settings.cuda_graphs else None
        self._device_counter = DeviceCounter(self.fabric, self.device) if on_gpu(self.device) else None
        self.counter: LayerCounter = self._device_counter.counter if self._device_counter else self.fabric.new_counter()
        self._forward_thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._checksum_thread = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._slow_layer = settings.faults.get("slow-layer-ms", 0) / 1e3
        if on_gpu(self.device):
            self.warm_up()

    def _open_graphs(self) -> DecodeGraphs | None:
        if can_capture(self.model):
            return DecodeGraphs(self.model, self.pool)
        get_logger().warning("--cuda-graphs does not apply: they take one rank, FlashInfer and a model without experts")
        return None

    def warm_up(self) -> None:
        """Run a decode and a prefill step, before there is a request.

        Libraries build and load kernels when these are first needed, which takes up to minutes: better now.
        """
        self.forward([SequenceSlice([0], 0, [0])])
        self.forward([SequenceSlice([0, 0], 0, [0, 1])])

    def _inject(self, faults: dict[str, float]) -> None:
        unknown = set(faults) - set(_FABRIC_FAULTS) - _MODEL_FAULTS
        if unknown:
            msg = f"--fault: unknown {sorted(unknown)}; known are {sorted([*_FABRIC_FAULTS, *_MODEL_FAULTS])}"
            raise ValueError(msg)
        for name in set(faults) & set(_FABRIC_FAULTS):
            kind, unit = _FABRIC_FAULTS[name]
            get_logger().warning("fault injection is on", fault=name, value=faults[name])
            self.fabric.fault(kind, int(faults[name] * unit))

    def register(self) -> list[MemoryRegion]:
        """Register every rank's KV pool, each under a new key; whoever asked closes them, or the fabric at its end."""
        return [self.fabric.register(pool.registered) for pool in self.pools]

    async def compute(self, work: Callable[[], T]) -> T:
        """Run `work` in the forward thread, one at a time, while the event loop goes on.

        Never returns once a rank is lost: the node ends then, and what it had is not to be told of as failed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._forward_thread, work)
        except RankLostError:
            await asyncio.Event().wait()
            raise

    def forward(
        self, slices: Sequence[SequenceSlice], on_layer: OnLayer | None = None, *, logits: bool = True
    ) -> torch.Tensor | None:
        """Run one step on all ranks, in the forward thread; arguments and result are those of `Model.forward`.

        Raises BatchError before anything is computed, RankLostError when the ranks can't go on.
        """

        def run(batch: ForwardBatch) -> torch.Tensor | None:
            if self._graphs is not None and on_layer is None and logits and self._graphs.fits(batch):
                return self._graphs.run(batch)
            return self.model.forward(batch, self.pool, on_layer, logits=logits)

        return self._together(Step(list(slices), Work.LOGITS if logits else Work.KEEP), run)

    def hidden_states(self, slices: Sequence[SequenceSlice], on_layer: OnLayer | None = None) -> torch.Tensor:
        """Run one step as `forward` does; returns the hidden states that the wanted logits would be of.

        They are [rows, E], on the host, as all hidden states that go in and out here.
        """
        return self._together(
            Step(list(slices), Work.HIDDEN),
            lambda batch: self.model.hidden_states(batch, self.pool, batch.logit_rows, on_layer).cpu(),
        )

    def judge(self, slices: Sequence[SequenceSlice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step as `forward` does; returns hidden states [rows, E] and logits of what wants any: some must."""

        def both(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.model.hidden_states(batch, self.pool, batch.logit_rows)
            logits = self.model.score(hidden)
            assert logits is not None
            return hidden.cpu(), logits

        return self._together(Step(list(slices), Work.LOGITS), both)

    def draft(self, slices: Sequence[SequenceSlice], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `Model.draft` on all ranks; returns its result and the logits of that, None where nothing wants any."""

        def guess(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
            out = self.model.draft(batch, hidden.to(self.device), self.pool)
            return out.cpu(), self.model.score(out) if batch.wants_logits else None

        return self._together(Step(list(slices), Work.DRAFT, hidden), guess)

    def _together(self, step: Step, compute: Callable[[ForwardBatch], T]) -> T:
        """Have all ranks begin a step, and take this one's share in it."""
        batch = ForwardBatch.build(step.slices, page_size=self.layout.page_size, device=self.device)
        self.pool.settle()
        try:
            return self._compute(step, batch, compute)
        finally:
            if on_gpu(self.device):
                # What is said to be computed may be sent, or built on, at once; what went wrong is to be known here.
                torch.cuda.synchronize(self.device)

    def _compute(self, step: Step, batch: ForwardBatch, compute: Callable[[ForwardBatch], T]) -> T:
        if not len(self.ranks):
            return compute(batch)
        self.model.check(batch, self.pool)
        self.ranks.broadcast(step, self.layout.page_size)
        try:
            return compute(batch)
        except Exception as error:
            # Whatever it is: the others wait in the midst of a step that this rank has left.
            raise self.ranks.lost(error) from error

    def new_context_slots(self, count: int) -> ContextSlots:
        """Make context slots for this model's hidden states; they live as long as the worker."""
        slots = ContextSlots(count, self.config.hidden_size, self.model.dtype)
        self._contexts.append(slots)
        return slots

    async def checksums(self, pages: Sequence[int], places: Sequence[Place]) -> Int32s:
        """Checksums of `places` of `pages`, [layer][page], computed beside event loop and forward pass."""
        work = functools.partial(page_checksums, self.pools, pages, places)
        return await asyncio.get_running_loop().run_in_executor(self._checksum_thread, work)

    def on_layer(self, _layer: int) -> None:
        """Called by the model after a layer's output projection: the fabric posts that layer's writes.

        On the lead alone: the projection's sum over the ranks is there, so every rank has written its keys and values.
        """
        if self._slow_layer:
            time.sleep(self._slow_layer)
        if self._device_counter is not None:
            self._device_counter.bump()
        else:
            self.counter.bump()

    @property
    def max_context(self) -> int:
        """Tokens that one request may have here: what the model knows positions for, and what the pool holds."""
        return min(self.config.max_positions, self.pool.pages * self.layout.page_size)

    def page_state(self) -> dict[str, int]:
        """Pages by state, for /state and metrics."""
        book = self.allocator
        return {
            "free": book.free_pages - book.cached_pages,
            "held": book.held_pages,
            "quarantined": book.quarantined_pages,
            "cached": book.cached_pages,
        }

    def prefix_state(self) -> dict[str, int]:
        """What the prefix cache has done so far, in pages, for /state and metrics."""
        book = self.allocator
        return {"hits": book.hits, "published": book.published, "evicted": book.evicted}

    def close(self) -> None:
        """Give everything back: the forward thread first, the memory last."""
        self._forward_thread.shutdown()
        self._checksum_thread.shutdown()
        # Ends its thread first, whatever is under way; regions, counters and connections go with it.
        self.fabric.close()
        if self._device_counter is not None:
            self._device_counter.close()
        for pool in self.pools:
            pool.close()
        for slots in self._contexts:
            slots.close()
        self.ranks.close()
