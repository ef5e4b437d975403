"""The layer counter: raised in the order of the stream, and on with every replay of a graph that has captured it."""

import torch
from kvferry_engine.device_counter import DeviceCounter
from kvferry_fabric import TransferEngine

from gpu_checks import DEVICE, must

BUSY_CYCLES = 400_000_000
"""Some tenths of a second of the GPU's clock."""
LAYERS, REPLAYS = 4, 3


def _pass(counter: DeviceCounter, x: torch.Tensor) -> None:
    for _ in range(LAYERS):
        x.add_(1)
        counter.bump()


def run() -> str:
    x = torch.zeros(1 << 20, device=DEVICE)
    with TransferEngine("tcp", incarnation=1) as engine:
        counter = DeviceCounter(engine, DEVICE)
        _pass(counter, x)  # what is used for the first time is loaded first, for which the GPU is waited for
        torch.cuda.synchronize()
        must(counter.counter.value == LAYERS, f"the counter stands at {counter.counter.value}, not {LAYERS}")
        torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001 - torch's own tests have no other way
        _pass(counter, x)
        early = counter.counter.value
        torch.cuda.synchronize()
        must(early == LAYERS, f"the counter stood at {early} before the work in front of it was done")
        must(counter.counter.value == 2 * LAYERS, f"the counter stands at {counter.counter.value}, not {2 * LAYERS}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _pass(counter, x)
        must(counter.counter.value == 2 * LAYERS, "capturing has raised the counter")
        for replay in range(REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
            wanted = LAYERS * (replay + 3)
            must(counter.counter.value == wanted, f"after replay {replay} it is {counter.counter.value}, not {wanted}")
        must(bool((x == LAYERS * (REPLAYS + 2)).all()), "the graph has not computed what it counts")
    counter.close()
    return f"{LAYERS} layers in stream order, and {REPLAYS} replays of a graph, counted"
