"""The prefiller's own settings."""

from typing import Annotated

import msgspec
from kvferry_engine.worker_settings import Count, WorkerSettings
from kvferry_node.settings import Seconds, help_text


class PrefillerSettings(WorkerSettings, kw_only=True, frozen=True):
    """Settings of a prefiller."""

    chunk_size: Annotated[
        int,
        msgspec.Meta(ge=1, le=1 << 20),
        help_text("Prompt tokens that a forward pass takes at most, over all requests in it."),
    ] = 512
    max_running: Annotated[Count, help_text("Requests that may hold pages at once.")] = 64
    overtake_seconds: Annotated[
        Seconds, help_text("How long a prompt may be overtaken by shorter ones that came later.")
    ] = 2.0
