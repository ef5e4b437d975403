"""sysfs, read into a machine: what Linux tells without any library, and what hwloc does not (rates, link states)."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvferry_fabric.topology import pci
from kvferry_fabric.topology.cpuset import from_list
from kvferry_fabric.topology.errors import TopologyError
from kvferry_fabric.topology.machine import ETHERNET, INFINIBAND, Core, Gpu, Machine, Nic

SYS = Path("/sys")
_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_RATE = re.compile(r"([\d.]+) ?(Gb|GT)/s.*")


def read(root: Path = SYS) -> Machine:
    """Read the machine under `root`. Functions that lack what is needed of them are skipped and named in `notes`.

    Raises TopologyError if there are no CPUs: this is no Linux, or sysfs is not mounted.
    """
    cores = tuple(_cores(root))
    if not cores:
        msg = f"{root}/devices/system/cpu tells of no CPU"
        raise TopologyError(msg)
    gpus, nics, notes = _devices(root)
    nodes = {core.numa for core in cores}
    if len(nodes) == 1:
        # A machine of one node, virtual ones above all, often says -1: there is nothing to say.
        only = nodes.pop()
        gpus = [msgspec.structs.replace(gpu, numa=only) for gpu in gpus]
        nics = [msgspec.structs.replace(nic, numa=only) for nic in nics]
    name = _text(root / "class/dmi/id/product_name")
    return Machine(source="sysfs", name=name, cores=cores, gpus=tuple(gpus), nics=tuple(nics), notes=tuple(notes))


def _devices(root: Path) -> tuple[list[Gpu], list[Nic], list[str]]:
    """GPUs and NICs in order of address, and what was skipped."""
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    notes: list[str] = []
    rdma, interfaces = _by_function(root / "class/infiniband"), _by_function(root / "class/net")
    folders = [folder for folder in _folders(root / "bus/pci/devices") if _FUNCTION.fullmatch(folder.name)]
    for folder in sorted(folders, key=lambda folder: pci.sort_key(folder.name)):
        try:
            vendor, device, code = (_hex(folder / name) for name in ("vendor", "device", "class"))
        except TopologyError as error:
            notes.append(f"PCI function {folder.name}: skipped: {error}")
            continue
        address, ids, code = folder.name, f"{vendor:04x}:{device:04x}", code >> 8  # without the programming interface
        if pci.is_gpu(vendor, code):
            gpus.append(Gpu(address=address, model=ids, path=_path(folder), numa=_numa(folder)))
        elif code >> 8 == pci.NETWORK or address in rdma:
            nic = _nic(folder, ids, rdma.get(address, []), interfaces.get(address, []))
            layer = nic.link_layer or pci.link_layer(vendor, device, code)
            nics.append(msgspec.structs.replace(nic, link_layer=layer))
    return gpus, nics, notes


def _cores(root: Path) -> Iterable[Core]:
    """Physical cores, one for each set of sibling threads; CPUs that are offline have no topology."""
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in _folders(root / "devices/system/node", "node[0-9]*")
        for cpu in from_list(_text(folder / "cpulist"))
    }
    threads = {
        from_list(_text(folder / "topology/thread_siblings_list"))
        for folder in _folders(root / "devices/system/cpu", "cpu[0-9]*")
    }
    threads.discard(frozenset())
    if not threads:
        # Some sandboxes name the CPUs and nothing of how they hang together.
        threads = {frozenset((cpu,)) for cpu in from_list(_text(root / "devices/system/cpu/online"))}
    for cpus in sorted(threads, key=min):
        yield Core(cpus=tuple(sorted(cpus)), numa=nodes.get(min(cpus)))


def _nic(folder: Path, ids: str, rdma: list[Path], interfaces: list[Path]) -> Nic:
    port = rdma[0] / "ports/1" if rdma else None
    told = _text(port / "link_layer") if port else ""
    return Nic(
        address=folder.name,
        ids=ids,
        path=_path(folder),
        numa=_numa(folder),
        rdma=rdma[0].name if rdma else "",
        interfaces=tuple(interface.name for interface in interfaces),
        model=ids,
        # EFA says "Unspecified", and its PCI identity knows better.
        link_layer=told if told in {INFINIBAND, ETHERNET} else "",
        port_gbps=_rate(_text(port / "rate")) if port else _fastest(interfaces),
        slot_gbps=_slot(folder),
        up="ACTIVE" in _text(port / "state") if port else _any_up(interfaces),
        wireless=any((i / "phy80211").exists() or (i / "wireless").exists() for i in interfaces),
    )


def _path(folder: Path) -> tuple[str, ...]:
    """The bridges above a PCI function, read off where its link leads."""
    above = folder.resolve().parts[:-1]
    return tuple(part for part in above if _FUNCTION.fullmatch(part) or _HOST_BRIDGE.fullmatch(part))


def _numa(folder: Path) -> int | None:
    text = _text(folder / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: unknown


def _slot(folder: Path) -> float | None:
    width = _text(folder / "current_link_width")
    match = _RATE.fullmatch(_text(folder / "current_link_speed"))
    return pci.link_gbps(float(match[1]), int(width)) if match and width.isdecimal() else None


def _rate(text: str) -> float | None:
    """Rate of an RDMA port: "400 Gb/sec (4X NDR)"."""
    number = text.partition(" ")[0]
    return float(number) or None if re.fullmatch(r"\d+(\.\d+)?", number) else None


def _fastest(interfaces: list[Path]) -> float | None:
    """Rate of the fastest of some network interfaces, which tell it in Mb/s, or -1."""
    speeds = [int(text) for text in (_text(interface / "speed") for interface in interfaces) if text.isdecimal()]
    return max(speeds, default=0) / 1000 or None


def _any_up(interfaces: list[Path]) -> bool | None:
    states = {_text(interface / "operstate") for interface in interfaces}
    if "up" in states:
        return True
    return None if not states or states & {"", "unknown"} else False


def _by_function(folder: Path) -> dict[str, list[Path]]:
    """Devices of a class, by the PCI function they sit on, through a virtio or other device between if need be."""
    found: dict[str, list[Path]] = {}
    for device in sorted(_folders(folder)):
        above = (device / "device").resolve().parts if (device / "device").exists() else ()
        function = next((part for part in reversed(above) if _FUNCTION.fullmatch(part)), None)
        if function is not None:
            found.setdefault(function, []).append(device)
    return found


def _folders(folder: Path, pattern: str = "*") -> list[Path]:
    try:
        return [path for path in folder.glob(pattern) if path.is_dir()]
    except OSError:
        return []


def _hex(path: Path) -> int:
    text = _text(path)
    if not re.fullmatch(r"0x[0-9a-f]{1,6}", text):
        msg = f"{path.name} is {text[:40]!r}"
        raise TopologyError(msg)
    return int(text, 16)


def _text(path: Path) -> str:
    """Content of a file; "" if it is not there or can't be read, as many of sysfs can't while a link is down."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
