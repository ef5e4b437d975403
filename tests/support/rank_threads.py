"""The ranks of one model as threads of the test's own process: real gloo, no processes to start."""

from concurrent.futures import ThreadPoolExecutor

import torch
from engine_runner import Runner
from kvferry_engine.ranks.group import GlooGroup
from kvferry_engine.shard import Shard
from kvferry_engine.weights import load_model


class RankThreads:
    """A `Runner` per rank, all of which take every step together."""

    def __init__(self, folder, ranks, **options):
        store = torch.distributed.HashStore()
        self._threads = ThreadPoolExecutor(ranks)

        def build(rank):
            shard = Shard(rank, ranks, GlooGroup(store, rank, ranks))
            return Runner(load_model(folder, "float32", shard=shard), **options)

        self.runners = list(self._threads.map(build, range(ranks)))
        self.layout = self.runners[0].pool.layout
        # All ranks deal out the same pages.
        self.sequence = self.runners[0].sequence

    def step(self, *slices, on_layer=None, **options):
        """Logits of the first rank, which calls `on_layer`; the others must have none."""

        def step(runner):
            lead = {"on_layer": on_layer} if runner is self.runners[0] else {}
            return runner.step(*slices, **options, **lead)

        first, *others = self.each(step)
        assert others == [None] * len(others)
        return first

    def each(self, work):
        """What `work` makes of each rank's runner, all at once."""
        return list(self._threads.map(work, self.runners))

    def close(self):
        self._threads.shutdown()
