"""A decoder's books, made of its settings and of what its worker has."""

import functools

from kvferry_engine.context_slots import ContextSlots
from kvferry_engine.worker import Worker

from kvferry_decoder.receiver import Receiver
from kvferry_decoder.scheduler import Scheduler
from kvferry_decoder.settings import DecoderSettings
from kvferry_decoder.slots import SlotPool
from kvferry_decoder.speculation import Speculation


def make_scheduler(worker: Worker, settings: DecoderSettings) -> Scheduler:
    """Make the book of requests and pages."""
    return Scheduler(
        worker.allocator,
        worker.layout,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        prefill_budget=settings.prefill_tokens,
        local_prefill=settings.local_prefill_tokens,
        speculation=Speculation(settings.speculate, settings.draft_tokens, worker.max_context),
    )


def make_receiver(worker: Worker, settings: DecoderSettings, context: ContextSlots | None) -> Receiver:
    """Make the book of transfers; `context`: slots that hidden states arrive in, where they are wanted."""
    register_context = functools.partial(worker.fabric.register, context.shared) if context is not None else None
    return Receiver(worker.fabric, worker.register, worker.allocator, SlotPool(settings.slots), register_context)
