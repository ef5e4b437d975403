"""Names for memory that a peer may write to."""

import msgspec


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A registered region of one rank, as its owner tells it to a writer.

    Carries its length, so that a writer checks bounds before it posts, and the incarnation of its owner, so that a
    region of a node that has since restarted is never written to.
    """

    provider: str
    """libfabric provider whose endpoint is meant by `address`."""
    address: str
    """fi_getname of the owner's endpoint, in hex."""
    base: int
    """What a writer adds its offset to: a virtual address, or 0 where the provider addresses by offset."""
    length: int
    """Bytes."""
    key: int
    incarnation: int
