"""The decoder's own settings."""

from typing import Annotated, Literal

import msgspec
from kvferry_engine.worker_settings import Count, WorkerSettings
from kvferry_node.settings import Seconds, help_text
from kvferry_proto.immediate import MAX_SLOTS

Speculate = Literal["off", "ngram", "mtp"]


class DecoderSettings(WorkerSettings, kw_only=True, frozen=True):
    """Settings of a decoder."""

    max_running: Annotated[Count, help_text("Requests in the decode batch, or on their way into it.")] = 64
    slots: Annotated[
        int, msgspec.Meta(ge=1, le=MAX_SLOTS), help_text("Transfers that may be on their way here at once.")
    ] = 256
    local_prefill_tokens: Annotated[
        int,
        msgspec.Meta(ge=0),
        help_text("Prompts with at most so many tokens to prefill are prefilled here, not by a prefiller."),
    ] = 32
    mixed: Annotated[
        bool,
        help_text("Prefill every prompt here, in chunks of --prefill-budget tokens beside the decoding requests."),
    ] = False
    prefill_budget: Annotated[
        int,
        msgspec.Meta(ge=0, le=1_000_000),
        help_text(
            "Prompt tokens that a step may prefill beside its decoding requests, which wait for them. 0: 32, or 128 "
            "with --mixed."
        ),
    ] = 0
    speculate: Annotated[
        Speculate,
        help_text(
            "Guess tokens ahead and compute them together; answers stay the same. ngram: by what followed the last "
            "time that a request's tokens read like this. mtp: by the model's drafting layer."
        ),
    ] = "off"
    draft_tokens: Annotated[
        int,
        msgspec.Meta(ge=1, le=16),
        help_text("Tokens that --speculate guesses ahead at most; fewer where many requests run."),
    ] = 3
    transfer_seconds: Annotated[
        Seconds, help_text("How long a prompt's KV may take to arrive, the prefiller's queue included.")
    ] = 120.0
    cancel_retry_seconds: Annotated[
        Seconds, help_text("How often a prefiller that has not confirmed a cancel is asked again.")
    ] = 1.0

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that a step may prefill."""
        return self.prefill_budget or (128 if self.mixed else 32)
