"""What can go wrong between a node and its surroundings."""


class NodeError(Exception):
    """Base of this package's own errors."""


class SettingsError(NodeError, ValueError):
    """A setting is not allowed; the message names the flag, where the value came from, and what is allowed."""


class BindError(NodeError):
    """A socket cannot be bound; the message names the address and the flag to change."""


class ChannelError(NodeError):
    """A message was not sent. Nothing of it left this node."""


class QueueFull(ChannelError):  # noqa: N818 - the name says it
    """The peer does not read as fast as this node writes, or is not there: its queue is at the high-water mark."""


class PeerGone(ChannelError):  # noqa: N818 - the name says it
    """The socket that the message would answer is no longer connected."""


class NodeIdTaken(NodeError):  # noqa: N818 - the name says it
    """Another process has joined the cluster under this node's id; the newest one keeps it."""
