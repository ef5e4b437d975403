"""Network interfaces of this host, and the hardware below them."""

from pathlib import Path

from kvferry_fabric.native import load

NET = Path("/sys/class/net")
_ROOM = 64
_LEVELS = 8
"""A VLAN on a bridge on a bond is three."""


def interface_of(address: str) -> str | None:
    """Return the interface that has a local address or host name; None if none has.

    Raises FabricUnavailableError if the extension is not built.
    """
    ffi, lib = load()
    name = ffi.new("char[]", _ROOM)
    return ffi.string(name).decode() if lib.kf_interface(address.encode(), name, _ROOM) == 0 else None


def hardware_below(interface: str, net: Path = NET, levels: int = _LEVELS) -> frozenset[str]:
    """Return the interfaces of NICs that carry an interface's packets: itself, or those of its bond, bridge or VLAN."""
    folder = net / interface
    if (folder / "device").exists():
        return frozenset((interface,))
    lower = [path.name.removeprefix("lower_") for path in folder.glob("lower_*")] if levels else []
    return frozenset().union(*(hardware_below(name, net, levels - 1) for name in lower))
