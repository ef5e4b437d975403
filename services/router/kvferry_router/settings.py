"""The router's own settings, beside those of every node."""

from pathlib import Path
from typing import Annotated

import msgspec
from kvferry_node.settings import Bytes, NodeSettings, Port, Seconds, help_text

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class RouterSettings(NodeSettings, kw_only=True, frozen=True):
    """Settings of a router."""

    model: Annotated[
        str, help_text("Folder of the model, for its tokenizer, chat template and limits; weights are not read.")
    ]
    served_model_name: Annotated[str, help_text("Name that clients ask for. Empty: the folder's name.")] = ""
    http_port: Annotated[Port, help_text("Port of the OpenAI API, and of /health, /ready, /metrics, /state.")] = 8000
    zmq_port: Annotated[Port, help_text("Port that ZeroMQ clients connect to; 0 takes any.")] = 5555
    max_inflight: Annotated[Count, help_text("Requests under way at once; more are answered 429.")] = 1024
    admission_queue: Annotated[
        int,
        msgspec.Meta(ge=0, le=1_000_000),
        help_text("Requests that may wait for a place when all decoders are full."),
    ] = 256
    admission_seconds: Annotated[Seconds, help_text("How long a request may wait for a place.")] = 5.0
    recovery_seconds: Annotated[
        float,
        msgspec.Meta(ge=0, le=86400),
        help_text("How long a request whose node is gone waits for another to come where none is left; 0: not at all."),
    ] = 30.0
    accept_seconds: Annotated[Seconds, help_text("How long a decoder may take to answer Assign.")] = 5.0
    cancel_seconds: Annotated[Seconds, help_text("How long a decoder may take to confirm a cancel.")] = 5.0
    request_seconds: Annotated[Seconds, help_text("How long a request may take from receipt to its last token.")] = (
        600.0
    )
    max_attempts: Annotated[
        int, msgspec.Meta(ge=1, le=100), help_text("Decoders tried for a request before its client gets the error.")
    ] = 3
    local_prefill: Annotated[
        bool,
        help_text("Whether a decoder prefills prompts of any length by itself while no prefiller is there."),
    ] = True
    reserve_answer_tokens: Annotated[
        int,
        msgspec.Meta(ge=1, le=1 << 20),
        help_text("Tokens of the answer that placement reserves pages for, beside the prompt's; the rest as it grows."),
    ] = 64
    prefix_affinity: Annotated[
        float,
        msgspec.Meta(ge=0, le=1_000_000),
        help_text("How many requests more than others a decoder that holds a prompt's KV may have and still get it."),
    ] = 4.0
    prefix_blocks: Annotated[
        Count, help_text("KV pages of which the router remembers who has them, to send follow-ups there.")
    ] = 65_536
    max_prompts: Annotated[Count, help_text("Prompts that one completions call may hold.")] = 64
    max_body_bytes: Annotated[Bytes, help_text("Largest HTTP body taken; more is answered 413.")] = 8 << 20
    default_chat_tokens: Annotated[
        Count, help_text("Longest answer of a chat that does not set max_tokens, if the context has the room.")
    ] = 1024
    client_stall_seconds: Annotated[
        Seconds, help_text("A ZeroMQ client that reads nothing for so long has its request cancelled.")
    ] = 10.0

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        return self.served_model_name or Path(self.model).resolve().name
