"""KV pages that one process's GPU wrote arrive in another's, which reads them with the GPU."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch
from kvferry_engine.kv_pool import KVPool
from kvferry_fabric import ChunkSchedule, EventKind, TransferEngine, providers, runs, takes_device_memory
from kvferry_proto.layout import KVLayout
from kvferry_proto.memory import MemoryDescriptor

from gpu_checks import DEVICE, must

LAYOUT = KVLayout(model="check", dtype="bfloat16", layers=8, kv_heads=8, head_dim=128, page_size=16)
PAGES = 64
SLOT, GENERATION = 1, 1
SECONDS = 60


def _event(engine: TransferEngine, kind: EventKind) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for event in engine.poll():
            must(event.kind is kind, f"{event.kind.name} in place of {kind.name}: {event.text}")
            return
        time.sleep(0.001)
    must(condition=False, what=f"{kind.name} did not come")


class Way(NamedTuple):
    """How pages go."""

    provider: str
    device: str
    in_gpu: bool

    def pool(self) -> KVPool:
        return KVPool(LAYOUT, PAGES, device=self.device, in_gpu=self.in_gpu)

    def engine(self, incarnation: int) -> TransferEngine:
        return TransferEngine(self.provider, incarnation=incarnation, device_memory=self.in_gpu)


def _receive(connection: Connection, way: Way) -> None:
    with way.pool() as pool, way.engine(2) as engine:
        region = engine.register(pool.registered)
        engine.expect(SLOT, GENERATION, PAGES * LAYOUT.layers)
        connection.send(region.descriptor)
        _event(engine, EventKind.ARRIVED)
        pool.settle()
        connection.send(pool.tensor.view(torch.int16).cpu().numpy())
        connection.recv()


def _schedule(
    engine: TransferEngine, pool: KVPool, remote: MemoryDescriptor, source: np.ndarray, target: np.ndarray
) -> ChunkSchedule:
    return ChunkSchedule(
        counter=None,
        first_value=0,
        layers=LAYOUT.layers,
        region=engine.register(pool.registered),
        peer=engine.connect(remote.addresses),
        remote=remote,
        slot=SLOT,
        generation=GENERATION,
        source_layer_stride=pool.layer_stride,
        destination_layer_stride=pool.layer_stride,
        source_page_stride=pool.page_stride,
        destination_page_stride=pool.page_stride,
        length=pool.page_stride,
        runs=runs(source, target),
    )


def run() -> str:
    sent = [over(Way("tcp", DEVICE, in_gpu=False))]
    direct = [name for name in providers() if takes_device_memory(name)]
    sent += [over(Way(name, DEVICE, in_gpu=True)) for name in direct]
    return "; ".join(sent) + ("" if direct else "; no provider here takes the memory of GPUs")


def over(way: Way) -> str:
    """Move pages between two processes, and compare them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, way))
    process.start()
    order = np.random.default_rng(0)
    source, target = order.permutation(PAGES), order.permutation(PAGES)
    with way.pool() as pool, way.engine(1) as engine:
        must(ours.poll(SECONDS), "the receiver did not come up")
        remote = ours.recv()
        pool.tensor.view(torch.int16).random_()
        pool.tensor.sum().item()  # waits for the GPU
        engine.schedule_layers(_schedule(engine, pool, remote, source, target))
        _event(engine, EventKind.DONE)
        must(ours.poll(SECONDS), "the receiver did not see the pages")
        arrived, sent = ours.recv(), pool.tensor.view(torch.int16).cpu().numpy()
        ours.send(None)
        process.join(SECONDS)
        must(np.array_equal(arrived[:, target], sent[:, source]), "bytes differ")
    where = "GPU memory" if way.in_gpu else "host memory that GPUs map"
    return f"{PAGES * LAYOUT.layers} pages of {LAYOUT.page_bytes} bytes over {way.provider} from and to {where}"
