"""What goes wrong between the ranks of a node."""

from kvferry_engine.errors import EngineError


class RankLostError(EngineError):
    """A rank has ended, or does not keep in step: none of the node's ranks can go on."""
