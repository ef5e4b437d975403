"""What this router has given to whom: a guess at which node holds a prompt's beginning.

Nodes evict pages without telling, and other routers send them prompts too: a wrong guess costs a hit, never an answer.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvferry_proto.hashing import block_hashes
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRef

HOLDERS = 4
"""Nodes remembered for a block, those that had it last."""


class PrefixMemory:
    """Block hashes of prompts and answers, and the nodes that have had them. Forgets the least recently used."""

    def __init__(self, blocks: int) -> None:
        """`blocks`: how many are remembered."""
        self._blocks = blocks
        self._holders: OrderedDict[int, tuple[NodeRef, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._holders)

    def note(self, node: NodeRef, layout: KVLayout, tokens: Sequence[int], salt: str) -> None:
        """A node has the KV of these tokens."""
        # The beginning last: it is of use without the end, and stays longer.
        for block in reversed(block_hashes(tokens, layout.page_size, layout.model, salt)):
            others = [ref for ref in self._holders.pop(block, ()) if ref != node]
            self._holders[block] = (node, *others[: HOLDERS - 1])
        while len(self._holders) > self._blocks:
            self._holders.popitem(last=False)

    def held(self, layout: KVLayout, tokens: Sequence[int], salt: str) -> dict[str, int]:
        """Return, by node id, how many of these tokens the nodes probably have, from the first on."""
        found: dict[str, int] = {}
        having: set[NodeRef] | None = None
        for number, block in enumerate(block_hashes(tokens, layout.page_size, layout.model, salt), 1):
            holders = set(self._holders.get(block, ()))
            having = holders if having is None else having & holders
            if not having:
                break
            found |= {ref.id: number * layout.page_size for ref in having}
        return found

    def forget(self, node: NodeRef) -> None:
        """A node is gone, and all that it had."""
        for block, holders in list(self._holders.items()):
            left = tuple(ref for ref in holders if ref != node)
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]
