"""What can go wrong when a machine's topology is read."""

from kvferry_fabric.errors import FabricError


class TopologyError(FabricError):
    """A topology can't be read or used; the text says which part of it, and why."""
