"""A sender in a process of its own: writes its random memory to a receiver.

Commands: `meet DESCRIPTOR` names the receiver's memory; `send PAGES LAYERS` starts a transfer of scattered pages, every
layer the same memory; `end` waits for its last event; `hash` (XXH3 of its memory), `writes N` (waits until so many were
posted), `stats`, `domains`, `quit`. Every command is answered by one line of JSON.
"""

import json
import sys

import fabric_rig as rig
import msgspec
import numpy as np
import xxhash
from kvferry_fabric import ChunkSchedule, MemoryRegion, Peer, Transfer, TransferEngine, runs
from kvferry_proto.memory import MemoryDescriptor

PAGE = 4096


class Sender:
    """The engine, its memory, and the receiver that it writes to."""

    def __init__(self, engine: TransferEngine, size: int) -> None:
        self.engine = engine
        self.memory = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
        self.region: MemoryRegion = engine.register(memoryview(self.memory))
        self.remote: MemoryDescriptor
        self.peer: Peer

    def meet(self, descriptor: str) -> None:
        self.remote = msgspec.json.decode(descriptor, type=MemoryDescriptor)
        self.peer = self.engine.connect(self.remote.addresses)

    def send(self, pages: int, layers: int) -> Transfer:
        table = np.random.default_rng(6).permutation(self.memory.size // PAGE)[:pages]
        chunk = ChunkSchedule(
            counter=None, first_value=0, layers=layers, region=self.region, peer=self.peer, remote=self.remote, slot=1,
            generation=1, source_layer_stride=0, destination_layer_stride=0, source_page_stride=PAGE,
            destination_page_stride=PAGE, length=PAGE, runs=runs(table, table),
        )  # fmt: skip
        return self.engine.schedule_layers(chunk).id

    def obey(self, line: list[str]) -> object:
        match line:
            case ["send", pages, layers]:
                return self.send(int(pages), int(layers))
            case ["meet", descriptor]:
                return self.meet(descriptor)
            case ["end"]:
                event = rig.take(self.engine, rig.ENDS, seconds=60)[0]
                return [event.kind.name, event.text]
            case ["writes", count]:
                rig.until(lambda: self.engine.stats().writes >= int(count), "writes")
                return None
            case ["hash"]:
                return xxhash.xxh3_64_hexdigest(self.memory)
            case ["domains"]:
                return [domain._asdict() for domain in self.engine.domain_stats()]
        return self.engine.stats()._asdict()


def main(provider: str, size: int, silence: float, domains: tuple[str, ...]) -> None:
    """Serve until `quit` or the end of stdin."""
    with TransferEngine(provider, incarnation=1, domains=domains, silence_seconds=silence) as engine:
        sender = Sender(engine, size)
        for line in sys.stdin:
            words = line.split()
            if words[0] == "quit":
                break
            print(json.dumps(sender.obey(words)), flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), tuple(sys.argv[4:]))
