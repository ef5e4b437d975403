"""Who uses what: to each GPU, or to the CPU pool where there is none, its NICs and its cores."""

from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from kvferry_fabric.topology import odd, pci
from kvferry_fabric.topology.cpuset import to_list
from kvferry_fabric.topology.errors import TopologyError
from kvferry_fabric.topology.machine import Core, Gpu, Machine, Nic
from kvferry_fabric.topology.nearness import Nearness, nearness

CPU = "cpu"
"""The device that a KV pool in host memory is on."""
T = TypeVar("T")


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one device uses."""

    device: str
    """PCI address of a GPU, or "cpu"."""
    model: str = ""
    numa: int | None
    """The NUMA node that its cores are on; None if they are on several, or unknown."""
    nics: tuple[Nic, ...]
    """In order of PCI addresses; empty on a machine without any."""
    nearness: Nearness
    """How near these are."""
    fabric_cores: tuple[Core, ...]
    """Where the fabric's thread may run. A GPU has one core for it: the last of its own, as the system's work gathers
    on the first. Pools in host memory, of which a host may have several, share those near the NICs."""
    worker_cores: tuple[Core, ...]
    """A GPU's other cores, its only one where it has one; all, for a pool in host memory."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, and who uses what of it."""

    machine: Machine
    cores: tuple[Core, ...]
    """Those of the machine's that may be used."""
    shares: tuple[Share, ...]
    left_out: tuple[odd.LeftOut, ...]
    provider: str | None = None
    """The libfabric provider that it was planned for; None: each NIC's best."""
    notes: tuple[str, ...] = ()
    """What had to be assumed, and what the reader skipped."""

    def share(self, device: str = CPU) -> Share:
        """Return what `device` uses: "cpu", or a GPU's PCI address in sysfs', CUDA's or NVML's form.

        Raises TopologyError if the machine has no such device, and names those that it has.
        """
        wanted = device if device == CPU else pci.address(device)
        for share in self.shares:
            if share.device == wanted:
                return share
        msg = f"no device {device} here, only {', '.join(share.device for share in self.shares)}"
        raise TopologyError(msg)


def domains_for(topology: Topology, device: str = CPU) -> tuple[str, ...]:
    """Return the libfabric domains of `device`'s NICs. Raises TopologyError as Topology.share does."""
    domains = (nic.domain(topology.provider) for nic in topology.share(device).nics)
    return tuple(domain for domain in domains if domain is not None)


class Cpus(msgspec.Struct, frozen=True, kw_only=True):
    """Logical CPUs to pin threads to, in the form that os.sched_setaffinity takes."""

    fabric: frozenset[int]
    """For the fabric's thread: all hardware threads of its cores."""
    workers: frozenset[int]
    """For everything else of the same process."""


def cpus_for(topology: Topology, device: str = CPU) -> Cpus:
    """Return the CPUs of `device`'s threads. Raises TopologyError as Topology.share does."""
    share = topology.share(device)
    fabric, workers = (
        frozenset(c for core in cores for c in core.cpus) for cores in (share.fabric_cores, share.worker_cores)
    )
    return Cpus(fabric=fabric, workers=workers)


def plan(
    machine: Machine, *, provider: str | None = None, allowed: Collection[int] | None = None, cpu_pool: bool = False
) -> Topology:
    """Share out a machine's NICs and cores.

    `provider`: the libfabric provider that will be opened; None: whatever suits the best NICs. `allowed`: logical CPUs
    that the process may use (os.sched_getaffinity); None: all. `cpu_pool`: plan for the KV pool in host memory though
    there are GPUs. GPUs with the same nearest NICs share them out evenly, as blocks of
    neighbours; where there are fewer NICs than GPUs, neighbours use one together. The cores of a NUMA node are shared
    out among its GPUs in the same way. Raises TopologyError if no core may be used.
    """
    notes = list(machine.notes)
    cores = _allowed(machine.cores, allowed, notes)
    nics, left_out = odd.choose(machine.nics, provider)
    pool = cpu_pool or not machine.gpus
    shares = [_for_pool(nics, cores)] if pool else _for_gpus(machine.gpus, nics, cores, notes)
    used = {nic.address for share in shares for nic in share.nics}
    spare = [nic for nic in nics if nic.address not in used]
    left_out += [odd.LeftOut(nic=nic, reason="every GPU has a nearer NIC") for nic in spare]
    left_out.sort(key=lambda left: pci.sort_key(left.nic.address))
    return Topology(
        machine=machine,
        cores=tuple(cores),
        shares=tuple(shares),
        left_out=tuple(left_out),
        provider=provider,
        notes=tuple(notes),
    )


def _allowed(cores: Sequence[Core], allowed: Collection[int] | None, notes: list[str]) -> list[Core]:
    if allowed is None:
        return list(cores)
    kept = [msgspec.structs.replace(core, cpus=tuple(cpu for cpu in core.cpus if cpu in allowed)) for core in cores]
    kept = [core for core in kept if core.cpus]
    if not kept:
        msg = f"none of the machine's cores is among the CPUs that may be used ({to_list(allowed)})"
        raise TopologyError(msg)
    if len(kept) < len(cores):
        notes.append(f"{len(kept)} of {len(cores)} cores may be used by this process")
    return kept


def _for_pool(nics: list[Nic], cores: list[Core]) -> Share:
    """The host's pool takes every NIC and every core; its fabric's thread runs on the first NIC's NUMA node."""
    home = nics[0].numa if nics else None
    near = [core for core in cores if core.numa == home] or cores
    nodes = {core.numa for core in cores}
    close = all(nic.numa == home for nic in nics) and (home is not None or len(nodes) == 1)
    return Share(
        device=CPU,
        numa=nodes.pop() if len(nodes) == 1 else None,
        nics=tuple(nics),
        nearness=Nearness.NUMA if nics and close else Nearness.SYSTEM,
        fabric_cores=tuple(near),
        worker_cores=tuple(cores),
    )


def _for_gpus(gpus: Sequence[Gpu], nics: list[Nic], cores: list[Core], notes: list[str]) -> list[Share]:
    theirs = _nics_of(gpus, nics)
    homes = {gpu.address: _home(gpu, theirs[gpu.address], cores, notes) for gpu in gpus}
    shares = []
    for gpu in gpus:
        node = homes[gpu.address]
        together = [other for other in gpus if homes[other.address] == node]
        mine = _block([core for core in cores if core.numa == node], together.index(gpu), len(together))
        near = min((nearness(gpu, nic)[0] for nic in theirs[gpu.address]), default=Nearness.SYSTEM)
        shares.append(
            Share(
                device=gpu.address,
                model=gpu.model,
                numa=node,
                nics=tuple(theirs[gpu.address]),
                nearness=near,
                fabric_cores=(mine[-1],),
                worker_cores=tuple(mine[:-1] or mine),
            )
        )
    return shares


def _nics_of(gpus: Sequence[Gpu], nics: list[Nic]) -> dict[str, list[Nic]]:
    """GPU -> its NICs. GPUs that sit nearer to theirs choose first; the others take what is free before they share."""
    groups: dict[tuple[tuple[Nearness, int], tuple[str, ...]], list[Gpu]] = {}
    for gpu in gpus:
        best = max((nearness(gpu, nic) for nic in nics), default=(Nearness.SYSTEM, 0))
        same = tuple(nic.address for nic in nics if nearness(gpu, nic) == best)
        groups.setdefault((best, same), []).append(gpu)
    taken: set[str] = set()
    theirs: dict[str, list[Nic]] = {}
    for (_, addresses), members in sorted(groups.items(), key=lambda group: group[0], reverse=True):
        near = [nic for nic in nics if nic.address in addresses]
        near = [nic for nic in near if nic.address not in taken] or near
        theirs |= {gpu.address: _block(near, place, len(members)) for place, gpu in enumerate(members)}
        taken.update(addresses)
    return theirs


def _home(gpu: Gpu, nics: list[Nic], cores: list[Core], notes: list[str]) -> int | None:
    """The NUMA node whose cores serve a GPU: its own, or else its NICs', or else the first that has any."""
    nodes = [core.numa for core in cores]
    if gpu.numa in nodes:
        return gpu.numa
    node = next((nic.numa for nic in nics if nic.numa is not None and nic.numa in nodes), nodes[0])
    if gpu.numa is not None or len(set(nodes)) > 1:
        why = "is unknown" if gpu.numa is None else f"({gpu.numa}) has no core that may be used"
        notes.append(f"GPU {gpu.address}: its NUMA node {why}; it gets cores of node {node}")
    return node


def _block(items: list[T], place: int, of: int) -> list[T]:
    """The part of `items` due to one of `of` sharers: neighbours; one item, used by several, where there are few."""
    if not items:
        return []
    first = place * len(items) // of
    return items[first : max((place + 1) * len(items) // of, first + 1)]
