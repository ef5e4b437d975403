"""A topology as text, for people."""

from collections.abc import Iterator, Sequence

from kvferry_fabric.topology.cpuset import to_list
from kvferry_fabric.topology.machine import Core, Nic
from kvferry_fabric.topology.nearness import WORDS, Nearness
from kvferry_fabric.topology.odd import rate
from kvferry_fabric.topology.pinning import pins
from kvferry_fabric.topology.planning import CPU, Share, Topology


def summary(topology: Topology) -> str:
    """Say it in one line."""
    machine, nics = topology.machine, {nic.address for share in topology.shares for nic in share.nics}
    parts = [
        _count(len(machine.gpus), "GPU") if machine.gpus else "no GPU",
        f"{_count(len(nics), 'NIC')} in use" + (f" ({_kind(topology)})" if nics else ""),
        f"{len(topology.left_out)} left out" if topology.left_out else "",
        f"{_count(len(machine.cores), 'core')} on {_count(max(1, len(machine.nodes)), 'NUMA node')}",
    ]
    return ", ".join(filter(None, parts))


def draw(topology: Topology) -> str:
    """Draw who uses what, what is left out and why, and what had to be assumed. Lines of text, without a final end."""
    machine = topology.machine
    lines = [f"{machine.name or 'this machine'} ({machine.source}): {summary(topology)}"]
    nodes = sorted({share.numa for share in topology.shares}, key=lambda node: -1 if node is None else node)
    for node in nodes:
        lines += _node(topology, node)
    lines += ["Where the fabric's thread of a node is pinned, its pool being in host memory"]
    lines += _tree([[pin] for pin in _pins(topology)])
    if topology.left_out:
        lines += ["NICs left out"]
        lines += _tree([[f"{left.nic.name} at {left.nic.address}: {left.reason}"] for left in topology.left_out])
    if topology.notes:
        lines += ["Notes", *_tree([[note] for note in topology.notes])]
    return "\n".join(lines)


def _node(topology: Topology, node: int | None) -> Iterator[str]:
    cores = [core for core in topology.machine.cores if node is None or core.numa == node]
    title = "all NUMA nodes" if node is None else f"NUMA node {node}"
    yield f"{title}: {_count(len(cores), 'core')}, CPUs {_cpus(cores)}"
    yield from _tree([_share(topology, share) for share in topology.shares if share.numa == node])


def _share(topology: Topology, share: Share) -> list[str]:
    name = "CPU pool" if share.device == CPU else f"GPU {share.device}  {share.model}"
    return [name, *_nics(topology, share), _cores(share)]


def _cores(share: Share) -> str:
    fabric, workers = _cpus(share.fabric_cores), _cpus(share.worker_cores)
    count = _count(len({*share.fabric_cores, *share.worker_cores}), "core")
    return f"{count}: the fabric's thread on CPUs {fabric}, " + (
        "as all" if fabric == workers else f"the rest on {workers}"
    )


def _pins(topology: Topology) -> list[str]:
    found = pins(topology)
    if not found:
        return [f"nowhere: {'all cores are as near' if topology.machine.nics else 'no NIC'}"]
    words = {node: "an unknown NUMA node" if node is None else f"NUMA node {node}" for node in found}
    return [f"with NICs of {words[node]}: CPUs {to_list(cpus)}" for node, cpus in found.items()]


def _nics(topology: Topology, share: Share) -> list[str]:
    if not share.nics:
        return ["NICs: none; tcp takes whatever way leads to the peer"]
    # A pool in host memory is near everything within its NUMA node.
    far = share.device == CPU and share.nearness is Nearness.SYSTEM
    words = "some on another NUMA node, or unknown" if far else WORDS[share.nearness]
    lines = [f"NICs: {words}"]
    for nic in share.nics:
        others = [other.device for other in topology.shares if other != share and nic in other.nics]
        lines.append(f"  {_nic(topology, nic)}" + (f", shared with {', '.join(others)}" if others else ""))
    return lines


def _nic(topology: Topology, nic: Nic) -> str:
    provider = topology.provider or nic.provider
    return "  ".join(filter(None, (nic.domain(provider), provider, rate(nic))))


def _kind(topology: Topology) -> str:
    first = next(nic for share in topology.shares for nic in share.nics)
    return ", ".join(filter(None, (topology.provider or first.provider, rate(first))))


def _tree(groups: Sequence[Sequence[str]]) -> Iterator[str]:
    """Hang each group's first line on a trunk, and the others below it."""
    for place, group in enumerate(groups):
        last = place == len(groups) - 1
        yield f"{'└─' if last else '├─'} {group[0]}"
        yield from (f"{'   ' if last else '│  '}   {line}" for line in group[1:])


def _cpus(cores: Sequence[Core]) -> str:
    return to_list(cpu for core in cores for cpu in core.cpus)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
