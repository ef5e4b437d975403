"""Which NICs carry KV pages: those of the kind that most of the machine's bandwidth is made of; the rest, with why not.

Storage and management NICs are near a GPU by chance, and slower; a transfer that is spread over unequal links ends
with the slowest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from kvferry_fabric.topology.machine import Nic


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A NIC that is not used."""

    nic: Nic
    reason: str


def choose(nics: Iterable[Nic], provider: str | None = None) -> tuple[list[Nic], list[LeftOut]]:
    """Return the NICs of the machine's prevailing kind, in order, and all others with the reason.

    In turn: those without a driver and those whose link is down fall out; where `provider` is given, those that it
    can't drive; where it isn't and there is RDMA, those without it; where there is a cable, those on the air; at last,
    those of another model, link layer or rate than the prevailing ones. A rate is the port's, or the PCI link's where
    the port's is unknown.
    """
    left_out: list[LeftOut] = []
    rest = _without(nics, lambda nic: not (nic.rdma or nic.interfaces), "no driver has claimed it", left_out)
    rest = _without(rest, lambda nic: nic.up is False, "its link is down", left_out)
    if provider is not None:
        rest = _without(rest, lambda nic: nic.domain(provider) is None, f"{provider} can't drive it", left_out)
    elif rdma := sum(bool(nic.rdma) for nic in rest):
        rest = _without(rest, lambda nic: not nic.rdma, f"no RDMA, which {rdma} others have", left_out)
    if not all(nic.wireless for nic in rest):
        rest = _without(rest, lambda nic: nic.wireless, "wireless, and there is one with a cable", left_out)
    return _prevailing(rest, left_out), left_out


def _without(nics: Iterable[Nic], odd: Callable[[Nic], bool], reason: str, left_out: list[LeftOut]) -> list[Nic]:
    nics = list(nics)
    left_out.extend(LeftOut(nic=nic, reason=reason) for nic in nics if odd(nic))
    return [nic for nic in nics if not odd(nic)]


def _prevailing(nics: list[Nic], left_out: list[LeftOut]) -> list[Nic]:
    kinds: dict[tuple[str, str, float], list[Nic]] = defaultdict(list)
    for nic in nics:
        kinds[nic.ids, nic.link_layer, _gbps(nic)].append(nic)
    # Of kinds that carry the same, the more numerous, then the one that comes first on the bus.
    best = max(kinds.values(), key=lambda alike: (sum(map(_gbps, alike)), len(alike)), default=[])
    for alike in kinds.values():
        if alike is not best:
            reason = f"it is {_kind(alike[0])}; {len(best)} others are {_kind(best[0])}"
            left_out.extend(LeftOut(nic=nic, reason=reason) for nic in alike)
    return best


def _gbps(nic: Nic) -> float:
    return nic.port_gbps or nic.slot_gbps or 0.0


def _kind(nic: Nic) -> str:
    return " ".join(filter(None, (nic.link_layer, nic.model or nic.ids, rate(nic))))


def rate(nic: Nic) -> str:
    """Say a NIC's rate; "" if unknown."""
    if nic.port_gbps:
        return f"{nic.port_gbps:g} Gb/s"
    return f"PCIe {nic.slot_gbps:g} Gb/s" if nic.slot_gbps else ""
