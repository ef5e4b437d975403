"""Who is in the cluster: node references, what a node publishes about itself, and its load."""

import enum
import secrets
from typing import Annotated

import msgspec

from kvferry_proto.layout import KVLayout

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class Role(enum.StrEnum):
    """What a node does."""

    ROUTER = "router"
    PREFILLER = "prefiller"
    DECODER = "decoder"
    CLIENT = "client"


class NodeRef(msgspec.Struct, frozen=True):
    """One life of a node: its name, and a number that is new at every start."""

    id: Name
    incarnation: int

    def __str__(self) -> str:
        return f"{self.id}#{self.incarnation:x}"


def new_incarnation() -> int:
    """Draw an incarnation: 53 random bits, so that it survives every JSON and Lua number; never 0."""
    return secrets.randbits(53) | 1


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A node that somebody is told to talk to."""

    ref: NodeRef
    endpoint: str
    """ZeroMQ endpoint of its ROUTER socket."""
    layout: KVLayout | None = None
    """How it lays out its KV cache: a decoder computes from its prefiller's how many writes to expect."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What placement weighs; renewed with every heartbeat."""

    free_pages: int = 0
    running: int = 0
    """Requests in the batch or on their way into it."""
    waiting: int = 0
    """Requests that wait for pages or a place."""
    queued_tokens: int = 0
    """Prompt tokens accepted and not yet prefilled."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node publishes in Redis under its lease."""

    ref: NodeRef
    role: Role
    endpoint: str
    model: str = ""
    """Name under which the model is served."""
    layout: KVLayout | None = None
    provider: str = ""
    """Fabric provider, and the host where it ends there; a pair of nodes must share one."""
    total_pages: int = 0
    max_context: int = 0
    """Tokens of prompt and answer together that a request may have here."""
    max_running: int = 0
    max_waiting: int = 0
    local_prefill_tokens: int = 0
    """Decoder: prompts with at most this many tokens to prefill are prefilled here."""
    metrics: str = ""
    """URL of the node's own /metrics, /health and /ready."""
    draining: bool = False

    @property
    def peer(self) -> Peer:
        """How to reach the node."""
        return Peer(ref=self.ref, endpoint=self.endpoint, layout=self.layout)
