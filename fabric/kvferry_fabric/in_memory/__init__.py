"""A transfer engine without a network, for unit tests: its writes wait until the test says what becomes of them.

network = Network(automatic=False)
sender, receiver = MemoryEngine(network, incarnation=1), MemoryEngine(network, incarnation=2)
...
network.land(network.flying[3])     # bytes and immediate are there, the sender has not heard of it
network.complete(network.flying[3]) # the sender has; it would have landed now if it had not before
network.fail(network.flying[0])     # refused: the sender is told
network.drop(network.flying[0])     # lost without a word to anybody
network.lose(receiver.address)      # as if it had been killed
"""

from kvferry_fabric.contract import Fabric
from kvferry_fabric.engine import TransferEngine
from kvferry_fabric.in_memory.engine import MemoryEngine
from kvferry_fabric.in_memory.network import Network, Write

__all__ = ["MemoryEngine", "Network", "Write"]

_SAME_CONTRACT: tuple[type[Fabric], type[Fabric]] = (TransferEngine, MemoryEngine)
"""Nothing reads it: the type checker does."""
