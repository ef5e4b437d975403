"""hwloc's XML, as lstopo writes it (hwloc 1.x, 2.x and 3.x), read into a machine.

Objects nest: packages, NUMA nodes, caches and cores are the CPU side; bridges, PCI functions and what the system
made of them (OSDev) the I/O side, hung under the CPU object that is nearest to them.
"""

from collections import Counter
from pathlib import Path
from xml.etree.ElementTree import Element

from kvferry_fabric.topology import hwloc_objects, pci
from kvferry_fabric.topology.cpuset import from_mask
from kvferry_fabric.topology.errors import TopologyError
from kvferry_fabric.topology.hwloc_objects import Function, Place
from kvferry_fabric.topology.machine import Core, Gpu, Machine, Nic
from kvferry_fabric.topology.safexml import MOST_BYTES, parse

CONTAINERS = {
    "System", "Machine", "Package", "Socket", "Die", "Group", "Cache", "MemCache", "L1Cache", "L2Cache", "L3Cache",
    "L4Cache", "L5Cache", "L1iCache", "L2iCache", "L3iCache",
}  # fmt: skip
IGNORED = {"Misc"}
NETWORK, RDMA = 2, 3
"""osdev_type of network interfaces and RDMA devices in files of hwloc 1.x and 2.x: a number."""
NETWORK_BIT, RDMA_BIT = 1 << 4, 1 << 5
"""The same in 3.x: a set of bits."""
PORT_ACTIVE = "4"


def read_file(path: Path) -> Machine:
    """Read a file that lstopo wrote. Raises TopologyError if it can't be read, with what is wrong in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        msg = f"{path}: {error.strerror}"
        raise TopologyError(msg) from error
    return read(data, path.name)


def read(data: bytes, what: str = "hwloc") -> Machine:
    """Read hwloc's XML; `what` names it in messages.

    Objects that lack what is needed of them are skipped and named in `notes`; so are types that this reader does not
    know, though not what is inside them. Raises TopologyError if it is no hwloc topology or has no CPUs.
    """
    root = parse(data, what)
    if root.tag != "topology":
        msg = f"{what}: the root element is <{root.tag[:40]}>, not <topology>: this is no hwloc XML"
        raise TopologyError(msg)
    reader = _Reader(root.get("version", "1.0").partition(".")[0])
    for child in root.iterfind("object"):
        reader.walk(child, Place(frozenset(), ()))
    if not reader.cores:
        msg = f"{what}: it has no CPUs" + "".join(f"; {note}" for note in reader.notes())
        raise TopologyError(msg)
    return reader.machine(what)


class _Reader:
    """The walk, and what it has gathered."""

    def __init__(self, version: str) -> None:
        self.name = ""
        self.cores: list[frozenset[int]] = []
        self._nodes: dict[int, frozenset[int]] = {}
        self._functions: list[Function] = []
        self._skipped: list[str] = []
        self._unknown: Counter[str] = Counter()
        self._bits = version == "3"

    def walk(self, element: Element, place: Place) -> None:
        """Take one object and everything inside it; a fault of the object alone is named, and the walk goes on."""
        kind = element.get("type", "")
        try:
            place = self._enter(kind, element, place)
        except TopologyError as error:
            self._skipped.append(f"{kind} {hwloc_objects.label(element)}: skipped: {error}")
        if kind not in {"Core", "PU", "PCIDev"} | IGNORED:
            for child in element.iterfind("object"):
                self.walk(child, place)

    def _enter(self, kind: str, element: Element, place: Place) -> Place:
        match kind:
            case "NUMANode":
                self._nodes[hwloc_objects.number(element, "os_index")] = from_mask(
                    hwloc_objects.needed(element, "cpuset")
                )
            case "Core" | "PU":
                self._add_core(kind, element)
            case "Bridge":
                return Place(place.cpus, (*place.path, hwloc_objects.bridge(element)))
            case "PCIDev":
                self._functions.append(hwloc_objects.function(element, place))
            case _ if kind not in CONTAINERS | IGNORED | {"OSDev"}:
                self._unknown[kind or "(none)"] += 1
        self.name = self.name or hwloc_objects.infos(element).get("DMIProductName", "").strip()
        return Place(from_mask(element.get("cpuset", "0x0")) or place.cpus, place.path)

    def _add_core(self, kind: str, element: Element) -> None:
        threads = [element] if kind == "PU" else [c for c in element.iter("object") if c.get("type") == "PU"]
        cpus = frozenset(hwloc_objects.number(thread, "os_index") for thread in threads)
        if not cpus:
            msg = "it has no PU"
            raise TopologyError(msg)
        self.cores.append(cpus)

    def notes(self) -> list[str]:
        """What was skipped."""
        unknown = [f"{count} objects of the unknown type {kind}" for kind, count in sorted(self._unknown.items())]
        return self._skipped + unknown

    def machine(self, source: str) -> Machine:
        """Put it together."""
        functions = sorted(self._functions, key=lambda function: pci.sort_key(function.address))
        gpus = [self._gpu(f) for f in functions if pci.is_gpu(f.vendor, f.code)]
        nics = [self._nic(f) for f in functions if f.code >> 8 == pci.NETWORK or self._systems(f, RDMA)]
        cores = [Core(cpus=tuple(sorted(cpus)), numa=self._numa(cpus)) for cpus in sorted(self.cores, key=min)]
        return Machine(
            source=source,
            name=self.name,
            cores=tuple(cores),
            gpus=tuple(gpus),
            nics=tuple(nics),
            notes=tuple(self.notes()),
        )

    def _numa(self, cpus: frozenset[int]) -> int | None:
        """Node of a set of CPUs. None for the whole of a machine of several nodes, which says nothing."""
        touched = sorted(node for node, local in self._nodes.items() if local & cpus)
        everything = frozenset().union(*self.cores)
        if not touched or (len(touched) > 1 and cpus >= everything):
            return None
        return touched[0]

    def _gpu(self, function: Function) -> Gpu:
        models = (hwloc_objects.infos(system).get("GPUModel") for system in function.systems)
        model = next(filter(None, models), None) or function.model
        place = function.place
        return Gpu(address=function.address, model=model, path=place.path, numa=self._numa(place.cpus))

    def _nic(self, function: Function) -> Nic:
        names = [system.get("name", "") for system in self._systems(function, NETWORK)]
        rdma = self._systems(function, RDMA)
        state = next((hwloc_objects.infos(system).get("Port1State") for system in rdma), None)
        return Nic(
            address=function.address,
            ids=function.ids,
            path=function.place.path,
            numa=self._numa(function.place.cpus),
            rdma=next((system.get("name", "") for system in rdma), ""),
            interfaces=tuple(sorted(names)),
            model=function.model,
            link_layer=pci.link_layer(function.vendor, function.device, function.code),
            slot_gbps=function.slot_gbps,
            up=None if state is None else state == PORT_ACTIVE,
            wireless=function.code == pci.OTHER_NETWORK_CLASS or any(name.startswith("wl") for name in names),
        )

    def _systems(self, function: Function, kind: int) -> list[Element]:
        """The function's interfaces (NETWORK) or RDMA devices (RDMA) that have a name."""
        bit = {NETWORK: NETWORK_BIT, RDMA: RDMA_BIT}[kind]
        told = [(s, s.get("osdev_type", "")) for s in function.systems if s.get("name")]
        known = [(system, int(text)) for system, text in told if text.isascii() and text.isdecimal() and len(text) < 10]
        return [system for system, value in known if (value & bit if self._bits else value == kind)]
