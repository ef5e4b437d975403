"""What a node that runs the model owns: ranks, weights, KV pools, page book, transfer engine, threads to compute in."""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from kvferry_fabric import FabricError, LayerCounter, MemoryRegion, TransferEngine
from kvferry_node.logs import get_logger
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRef

from kvferry_engine.checksums import Place, page_checksums
from kvferry_engine.config import ModelConfig
from kvferry_engine.context_slots import ContextSlots
from kvferry_engine.device_counter import DeviceCounter
from kvferry_engine.devices import on_gpu, resolve
from kvferry_engine.fabric_cpus import fabric_cpus
from kvferry_engine.fault_injection import inject
from kvferry_engine.kv_place import in_gpu
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.kv_size import enough_pages
from kvferry_engine.models.base import Model
from kvferry_engine.prefix_cache import PrefixCache
from kvferry_engine.ranks.errors import RankLostError
from kvferry_engine.ranks.processes import RankProcesses
from kvferry_engine.shard import ALONE, Shard
from kvferry_engine.stepping import Stepping
from kvferry_engine.weights import Progress, load_model
from kvferry_engine.worker_settings import WorkerSettings

T = TypeVar("T")


class Worker(Stepping):
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
        inject(self.fabric, settings.faults)
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

    def register(self) -> list[MemoryRegion]:
        """Register every rank's KV pool, each under a new key; whoever asked closes them, or the fabric at its end.

        Raises FabricError, and registers none, if one is refused.
        """
        regions: list[MemoryRegion] = []
        try:
            for pool in self.pools:
                regions.append(self.fabric.register(pool.registered))  # noqa: PERF401  # those before the refused one
        except FabricError:
            for region in regions:
                region.close()
            raise
        return regions

    async def compute(self, work: Callable[[], T]) -> T:
        """Run `work` in the forward thread, one at a time, while the event loop goes on.

        Never returns once a rank is lost: the node ends then, and what it had is not to be told of as failed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._forward_thread, work)
        except RankLostError:
            await asyncio.Event().wait()
            raise

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
