"""Single objects of hwloc's XML: what their attributes say, and what is wrong with them."""

import re
from xml.etree.ElementTree import Element

import msgspec

from kvferry_fabric.topology import pci
from kvferry_fabric.topology.errors import TopologyError

_PCI_TYPE = re.compile(r"([0-9a-fA-F]{4}) \[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\].*")
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_SPEED = re.compile(r"\d{1,6}(\.\d{1,9})?", re.ASCII)
_BUSES = re.compile(r"([0-9a-fA-F]{4,8}):\[([0-9a-fA-F]{2})-[0-9a-fA-F]{2}\]")


class Place(msgspec.Struct, frozen=True):
    """Where the walk is."""

    cpus: frozenset[int]
    """Logical CPUs of the nearest CPU object above; empty if it does not say."""
    path: tuple[str, ...]


class Function(msgspec.Struct):
    """A PCI function, before it is known what it is."""

    address: str
    code: int
    vendor: int
    device: int
    place: Place
    infos: dict[str, str]
    slot_gbps: float | None
    systems: list[Element]
    """OSDev elements under it."""

    @property
    def ids(self) -> str:
        """Vendor and device, such as 15b3:1021."""
        return f"{self.vendor:04x}:{self.device:04x}"

    @property
    def model(self) -> str:
        """Name of the model; its ids where hwloc had no list of names."""
        return self.infos.get("PCIDevice") or self.ids


def function(element: Element, place: Place) -> Function:
    """Read a PCIDev. Raises TopologyError if its address or type is absent or malformed."""
    match = _PCI_TYPE.fullmatch(needed(element, "pci_type"))
    if match is None:
        msg = f"pci_type is {element.get('pci_type', '')[:40]!r}"
        raise TopologyError(msg)
    code, vendor, device = (int(part, 16) for part in match.groups())
    return Function(
        address=pci.address(needed(element, "pci_busid")),
        code=code,
        vendor=vendor,
        device=device,
        place=place,
        infos=infos(element),
        slot_gbps=_slot_gbps(element),
        systems=[child for child in element.iter("object") if child.get("type") == "OSDev"],
    )


def _slot_gbps(element: Element) -> float | None:
    # The attribute is in GB/s; 0 where the link's state is unknown.
    told = element.get("pci_link_speed", "")
    return round(float(told) * 8, 1) or None if _SPEED.fullmatch(told) else None


def bridge(element: Element) -> str:
    """Name a Bridge as sysfs does: a host bridge (0-1) after its first bus, others by address.

    Raises TopologyError if it has neither.
    """
    if "pci_busid" in element.attrib:
        return pci.address(element.attrib["pci_busid"])
    match = _BUSES.fullmatch(needed(element, "bridge_pci"))
    if match is None:
        msg = f"bridge_pci is {element.attrib['bridge_pci'][:40]!r}"
        raise TopologyError(msg)
    return f"pci{match[1]}:{match[2]}".lower()


def infos(element: Element) -> dict[str, str]:
    """Names and values of the <info> elements right below."""
    return {info.get("name", ""): info.get("value", "") for info in element.iterfind("info")}


def needed(element: Element, attribute: str) -> str:
    """An attribute that must be there. Raises TopologyError if it is not."""
    value = element.get(attribute)
    if value is None:
        msg = f"it has no {attribute}"
        raise TopologyError(msg)
    return value


def number(element: Element, attribute: str) -> int:
    """A number that must be there. Raises TopologyError if it is not."""
    text = needed(element, attribute)
    if not _NUMBER.fullmatch(text):
        msg = f"{attribute} is {text[:40]!r}"
        raise TopologyError(msg)
    return int(text)


def label(element: Element) -> str:
    """What an object may be told apart by, for messages."""
    return next(
        (f"{key}={element.attrib[key][:40]}" for key in ("pci_busid", "name", "os_index") if key in element.attrib),
        "without a name",
    )
