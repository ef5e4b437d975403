"""What `kvferry doctor` asks of the fabric."""

import os
from pathlib import Path

import msgspec

from kvferry_fabric.errors import FabricError
from kvferry_fabric.huge_pages import HugePages, huge_pages
from kvferry_fabric.providers import providers
from kvferry_fabric.topology import CPU, Nearness, Topology, TopologyError, detect, draw, plan, read_file, summary
from kvferry_fabric.topology.machine import EFA, INFINIBAND


def findings() -> list[dict[str, str]]:
    """Return what was found, each with what to do about it: the extension and its providers; topology; huge pages."""
    return [_extension(), _topology(), huge_pages_for_pools(huge_pages())]


def topology(file: Path | None = None) -> dict[str, object]:
    """Return this machine's topology, or that of a file which lstopo wrote: `drawing` for people, `plan` for programs.

    Raises TopologyError (a RuntimeError) if it can't be read.
    """
    planned = _here() if file is None else plan(read_file(file))
    return {"drawing": draw(planned), "plan": msgspec.to_builtins(planned)}


def _here() -> Topology:
    return plan(detect(), allowed=os.sched_getaffinity(0))


def _extension() -> dict[str, str]:
    name = "fabric extension"
    try:
        usable = providers()
    except FabricError as error:
        return _finding(name, "fail", str(error), "install libfabric-dev and gcc, then build the extension: make setup")
    if not usable:
        text = "libfabric offers no provider that kvferry can use"
        return _finding(name, "fail", text, "install libfabric1 1.17 or newer")
    return _finding(name, "ok", f"the C extension opens {', '.join(usable)}", "")


def _topology() -> dict[str, str]:
    try:
        planned = _here()
    except TopologyError as error:
        advice = "threads will not be pinned, nor NICs chosen: mount /sys, or apt-get install hwloc-nox"
        return _finding("topology", "warn", str(error), advice)
    text = f"{summary(planned)} (--topology draws it)"
    advice = _advice(planned)
    return _finding("topology", "warn" if advice else "ok", text, advice)


def huge_pages_for_pools(found: HugePages) -> dict[str, str]:
    """Which huge pages KV pools on the host can lie in. None is no defect: they make copies within a host faster."""
    reserved = f"{found.free} of {found.reserved} reserved ones of {found.page_bytes >> 20} MiB free"
    text = f"{reserved}, transparent ones {'on request' if found.transparent else 'off for shared memory'}"
    if found.free or found.transparent:
        return _finding("huge pages", "ok", text, "")
    advice = (
        "KV pages come in two to three times as fast from the same host with them: echo advise > "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve enough for --kv-memory: sysctl vm.nr_hugepages=N"
    )
    return _finding("huge pages", "warn", text, advice)


def _advice(planned: Topology) -> str:
    """What would make transfers faster on this machine; "" if nothing stands out."""
    dead = [nic.address for nic in planned.machine.nics if nic.link_layer in {EFA, INFINIBAND} and not nic.rdma]
    if dead:
        return f"no RDMA driver has claimed {', '.join(dead)}: install and load it (efa; ib_core and mlx5_ib)"
    far = [share.device for share in planned.shares if share.device != CPU and share.nearness is Nearness.SYSTEM]
    if far:
        return f"GPUs without a NIC on their NUMA node send across: {', '.join(far)}; prefer the others"
    return ""


def _finding(name: str, level: str, text: str, advice: str) -> dict[str, str]:
    return {"name": name, "level": level, "text": text, "advice": advice}
