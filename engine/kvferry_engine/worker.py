"""What a node that runs the model owns: weights, KV pool, page book, transfer engine, and the threads to compute in."""

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

from kvferry_engine.allocator import PageAllocator
from kvferry_engine.checksums import page_checksums
from kvferry_engine.config import ModelConfig
from kvferry_engine.kv_pool import KVPool, pages_for_bytes
from kvferry_engine.models.base import Model
from kvferry_engine.weights import load_model
from kvferry_engine.worker_settings import WorkerSettings

T = TypeVar("T")

# Faults that the fabric injects by itself, and what its numbers mean there.
_FABRIC_FAULTS = {"corrupt-write": ("corrupt", 1), "delay-write-ms": ("delay", 1_000_000), "fail-write": ("fail", 1)}
_MODEL_FAULTS = {"slow-layer-ms"}


class Worker:
    """Opened once per process, closed after the service has drained. The event loop's thread owns all but what
    runs in `compute` and `checksums`."""

    def __init__(self, settings: WorkerSettings, ref: NodeRef) -> None:
        """Load the model and open the fabric, which takes seconds. Raises ValueError, OSError or FabricError."""
        torch.set_num_threads(settings.cpu_threads)
        self.settings = settings
        self.config = ModelConfig.from_folder(Path(settings.model))
        self.fabric = TransferEngine(
            settings.provider,
            incarnation=ref.incarnation,
            bind=settings.fabric_host or settings.host,
            trace=bool(settings.fault),
        )
        try:
            self._open(settings)
        except BaseException:
            self.fabric.close()
            raise

    def _open(self, settings: WorkerSettings) -> None:
        self._inject(settings.faults)
        self.model: Model = load_model(Path(settings.model), settings.dtype)
        self.layout: KVLayout = self.model.kv_layout(settings.page_size)
        self.pool = KVPool(self.layout, self._pages(settings), huge=settings.huge_pages)
        self.allocator = PageAllocator(self.pool.pages)
        self.counter: LayerCounter = self.fabric.new_counter()
        self._forward_thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._checksum_thread = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._slow_layer = settings.faults.get("slow-layer-ms", 0) / 1e3

    def _pages(self, settings: WorkerSettings) -> int:
        pages = pages_for_bytes(self.layout, settings.kv_memory)
        if pages < 2:
            needed = 2 * self.layout.page_bytes * self.layout.layers
            msg = f"--kv-memory {settings.kv_memory} holds {pages} pages; at least {needed} bytes (2 pages) are needed"
            raise ValueError(msg)
        return pages

    def _inject(self, faults: dict[str, float]) -> None:
        unknown = set(faults) - set(_FABRIC_FAULTS) - _MODEL_FAULTS
        if unknown:
            msg = f"--fault: unknown {sorted(unknown)}; known are {sorted([*_FABRIC_FAULTS, *_MODEL_FAULTS])}"
            raise ValueError(msg)
        for name in set(faults) & set(_FABRIC_FAULTS):
            kind, unit = _FABRIC_FAULTS[name]
            get_logger().warning("fault injection is on", fault=name, value=faults[name])
            self.fabric.fault(kind, int(faults[name] * unit))

    def register(self) -> MemoryRegion:
        """Register the KV pool, under a key of its own; whoever asked closes it, or the fabric does at its end."""
        return self.fabric.register(self.pool.buffer)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run `work` in the forward thread, one at a time, while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._forward_thread, work)

    async def checksums(self, pages: Sequence[int]) -> Int32s:
        """Checksums of `pages`, [layer][page], computed beside event loop and forward pass."""
        work = functools.partial(page_checksums, self.pool, pages)
        return await asyncio.get_running_loop().run_in_executor(self._checksum_thread, work)

    def on_layer(self, _layer: int) -> None:
        """Called by the model after a layer's output projection: the fabric posts that layer's writes."""
        if self._slow_layer:
            time.sleep(self._slow_layer)
        self.counter.bump()

    @property
    def max_context(self) -> int:
        """Tokens that one request may have here: what the model knows positions for, and what the pool holds."""
        return min(self.config.max_positions, self.pool.pages * self.layout.page_size)

    def page_state(self) -> dict[str, int]:
        """Pages by state, for /state and metrics."""
        book = self.allocator
        return {"free": book.free_pages, "held": book.held_pages, "quarantined": book.quarantined_pages}

    def close(self) -> None:
        """Give everything back: the forward thread first, the memory last."""
        self._forward_thread.shutdown()
        self._checksum_thread.shutdown()
        # Ends its thread first, whatever is under way; regions, counters and connections go with it.
        self.fabric.close()
        self.pool.close()
