"""Nodes that can't exchange pages: said aloud when they meet, since placement only passes them over."""

from kvferry_proto.nodes import NodeRecord, NodeRef, Role

from kvferry_node.logs import get_logger


def why_apart(prefiller: NodeRecord, decoder: NodeRecord) -> str | None:
    """Return why the two can't be paired, naming both and both values, or None if they can (placement.lua agrees)."""
    names = f"prefiller {prefiller.ref.id}", f"decoder {decoder.ref.id}"
    if prefiller.provider != decoder.provider:
        return f"provider differs: {prefiller.provider!r} on {names[0]}, {decoder.provider!r} on {names[1]}"
    if prefiller.layout is None or decoder.layout is None:
        return None
    return prefiller.layout.mismatch(decoder.layout, names=names)


class PairWatch:
    """Warns once of every prefiller and decoder that serve one model and can't be paired."""

    def __init__(self) -> None:
        self._nodes: dict[NodeRef, NodeRecord] = {}

    def joined(self, record: NodeRecord) -> None:
        """Compare a node that has joined with those that are there."""
        for other in self._nodes.values():
            roles = {record.role: record, other.role: other}
            if record.model == other.model and roles.keys() == {Role.PREFILLER, Role.DECODER}:
                self._compare(roles[Role.PREFILLER], roles[Role.DECODER])
        self._nodes[record.ref] = record

    def left(self, record: NodeRecord) -> None:
        """Forget a node: its next life is compared anew."""
        self._nodes.pop(record.ref, None)

    def _compare(self, prefiller: NodeRecord, decoder: NodeRecord) -> None:
        why = why_apart(prefiller, decoder)
        if why is not None:
            get_logger().warning(
                "these two can't be paired: no prompt of this decoder's goes to this prefiller",
                prefiller=prefiller.ref.id,
                decoder=decoder.ref.id,
                why=why,
            )
