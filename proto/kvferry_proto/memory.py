"""Names for memory that a peer may write to."""

import msgspec

MAX_DOMAINS = 8
"""Domains (NICs) of one engine, at most."""


class DomainMemory(msgspec.Struct, frozen=True, kw_only=True):
    """How a registered region is reached through one domain of its owner."""

    address: str
    """fi_getname of the domain's endpoint, in hex."""
    base: int
    """What a writer adds its offset to: a virtual address, or 0 where the provider addresses by offset."""
    key: int


class LocalMemory(msgspec.Struct, frozen=True, kw_only=True):
    """How a registered region is reached by a writer on the same host, who maps it."""

    seat: str
    """Abstract unix socket where the owner hands its memory out; to be reached within one network namespace."""
    key: int


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A registered region of one rank, as its owner tells it to a writer.

    Carries its length, so that a writer checks bounds before it posts, and the incarnation of its owner, so that a
    region of a node that has since restarted is never written to.
    """

    provider: str
    """libfabric provider of all its domains. With "local" there is one, and its address is the owner's seat."""
    length: int
    """Bytes."""
    incarnation: int
    domains: tuple[DomainMemory, ...]
    """One for each of the 1 to 8 domains of the owner; the number of the writer's may be another."""
    local: LocalMemory | None = None
    """The way around all domains, for writers that can reach the seat; None: there is none."""

    @property
    def seat(self) -> str:
        """Where a writer on the same host connects to as well; "" if there is no such place."""
        return self.local.seat if self.local else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the owner, one a domain: what a writer connects to."""
        return tuple(domain.address for domain in self.domains)
