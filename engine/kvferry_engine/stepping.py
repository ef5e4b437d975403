"""The passes of a worker: each is a step of all ranks, computed in the forward thread."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from kvferry_node.logs import get_logger
from kvferry_proto.layout import KVLayout

from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.decode_graphs import DecodeGraphs, can_capture
from kvferry_engine.devices import on_gpu
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models.base import Model, OnLayer
from kvferry_engine.ranks.processes import RankProcesses
from kvferry_engine.ranks.steps import Step, Work

T = TypeVar("T")


class Stepping:
    """Computes with what a worker has opened: its model, its pool, and the ranks beside it."""

    model: Model
    pool: KVPool
    layout: KVLayout
    ranks: RankProcesses
    device: str
    """Where this rank computes, as torch says it."""
    _graphs: DecodeGraphs | None

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
