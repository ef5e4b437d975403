"""The life of a rank that is not the lead: its slice of the weights, its pool, and the steps it is told to compute."""

import ctypes
import os
import signal
import socket
from pathlib import Path

import torch
from kvferry_node.logs import get_logger

from kvferry_engine.batch import ForwardBatch
from kvferry_engine.devices import resolve
from kvferry_engine.kv_place import in_gpu
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.kv_size import enough_pages
from kvferry_engine.models.base import Model
from kvferry_engine.ranks import steps
from kvferry_engine.ranks.group import join
from kvferry_engine.shard import Shard
from kvferry_engine.weights import load_model
from kvferry_engine.worker_settings import WorkerSettings

_PR_SET_PDEATHSIG = 1


def tether(parent: int) -> None:
    """Die with the process `parent`, however it ends, and leave to it what the signals mean that all are sent.

    `kvferry up` and terminals signal whole process groups; a rank that obeyed would end while its lead still drains.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The lead may have died before the wish was known.
    if os.getppid() != parent:
        os._exit(1)


def live(settings: WorkerSettings, rank: int, connection: socket.socket, store: int) -> int:
    """Serve the lead at the other end of `connection` until it closes; returns the exit status."""
    log = get_logger(rank=rank)
    try:
        _serve(settings, rank, connection, store)
    except Exception as error:  # the last stop: it becomes a log line, and the lead sees the end
        log.critical("a rank has failed", exc_info=error)
        return 1
    return 0


def _serve(settings: WorkerSettings, rank: int, connection: socket.socket, store: int) -> None:
    torch.set_num_threads(settings.rank_threads)
    shard = Shard(rank, settings.tp, join(store, rank, settings.tp))
    device = resolve(settings.device, settings.tp)[rank]
    model = load_model(Path(settings.model), settings.dtype, device=device, attention=settings.attention, shard=shard)
    layout = model.kv_layout(settings.page_size)
    pages = enough_pages(layout, settings.kv_memory)
    place = in_gpu(settings, device)
    with KVPool(layout, pages, device=device, huge=settings.huge_pages, in_gpu=place) as pool:
        pool.shared.send(connection)
        while (step := steps.receive(connection)) is not None:
            batch = ForwardBatch.build(step.slices, page_size=layout.page_size, device=device)
            pool.settle()
            _compute(model, batch, pool, step)


def _compute(model: Model, batch: ForwardBatch, pool: KVPool, step: steps.Step) -> None:
    """Take this rank's share of a step; what comes of it the lead has."""
    match step.work:
        case steps.Work.HIDDEN:
            model.hidden_states(batch, pool, batch.logit_rows)
        case steps.Work.DRAFT:
            assert step.hidden is not None
            hidden = step.hidden.view(model.dtype).view(batch.token_count, -1).to(model.device)
            out = model.draft(batch, hidden, pool)
            if batch.wants_logits:
                model.score(out)
        case _:
            model.forward(batch, pool, logits=step.work is steps.Work.LOGITS)
