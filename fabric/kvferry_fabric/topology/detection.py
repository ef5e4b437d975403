"""This machine: hwloc where it is installed, sysfs for the rest."""

import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from kvferry_fabric.topology import hwloc, sysfs
from kvferry_fabric.topology.errors import TopologyError
from kvferry_fabric.topology.machine import Machine, Nic

LSTOPO = "lstopo-no-graphics"
LSTOPO_SECONDS = 20.0
# hwloc's plugins for GPUs would open every GPU's driver, which takes seconds and memory; PCI tells all we need.
COMPONENTS = "-gl,-opencl,-cuda,-nvml,-rsmi,-levelzero"


def detect(root: Path = sysfs.SYS) -> Machine:
    """Read this machine from lstopo, completed from sysfs under `root`; from sysfs alone where lstopo is not there.

    A lstopo that fails is named in `notes`. Raises TopologyError if neither tells of a CPU.
    """
    linux = sysfs.read(root)
    if shutil.which(LSTOPO) is None:
        return linux
    try:
        return complete(hwloc.read(_lstopo()), linux)
    except TopologyError as error:
        return msgspec.structs.replace(linux, notes=(*linux.notes, f"{error}; sysfs was read instead"))


def complete(machine: Machine, linux: Machine) -> Machine:
    """Add to what hwloc told what only sysfs knows: rates and link states, and devices where hwloc has none.

    hwloc may have been built without PCI; then it has no device at all.
    """
    known = {nic.address: nic for nic in linux.nics}
    nics = tuple(_complete(nic, known[nic.address]) if nic.address in known else nic for nic in machine.nics)
    bare = not machine.gpus and not machine.nics
    return msgspec.structs.replace(
        machine,
        source=f"{machine.source}, sysfs",
        gpus=linux.gpus if bare else machine.gpus,
        nics=linux.nics if bare else nics,
        notes=machine.notes + linux.notes,
    )


def _complete(nic: Nic, linux: Nic) -> Nic:
    return msgspec.structs.replace(
        nic,
        rdma=nic.rdma or linux.rdma,
        interfaces=nic.interfaces or linux.interfaces,
        link_layer=linux.link_layer or nic.link_layer,
        port_gbps=linux.port_gbps,
        slot_gbps=nic.slot_gbps or linux.slot_gbps,
        up=nic.up if linux.up is None else linux.up,
        numa=linux.numa if nic.numa is None else nic.numa,
        wireless=nic.wireless or linux.wireless,
    )


def _lstopo() -> bytes:
    environment = {**os.environ, "HWLOC_COMPONENTS": COMPONENTS}
    command = [LSTOPO, "--of", "xml"]
    try:
        told = subprocess.run(command, capture_output=True, timeout=LSTOPO_SECONDS, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"{LSTOPO}: {error}"
        raise TopologyError(msg) from error
    if told.returncode != 0:
        msg = f"{LSTOPO} ended with status {told.returncode}: {told.stderr.decode(errors='replace').strip()[:200]}"
        raise TopologyError(msg)
    return told.stdout
