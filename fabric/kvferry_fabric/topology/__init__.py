"""Where GPUs, NICs and cores sit in a machine, and which NICs and cores each GPU should use.

Readers turn hwloc's XML or sysfs into a Machine; everything after that is arithmetic on it, so that a recorded
machine is as good as the one at hand. `plan(detect(), allowed=os.sched_getaffinity(0))` is the usual way in.
"""

from kvferry_fabric.topology.detection import complete, detect
from kvferry_fabric.topology.drawing import draw, summary
from kvferry_fabric.topology.errors import TopologyError
from kvferry_fabric.topology.hwloc import read_file
from kvferry_fabric.topology.machine import Core, Gpu, Machine, Nic
from kvferry_fabric.topology.nearness import Nearness
from kvferry_fabric.topology.odd import LeftOut
from kvferry_fabric.topology.pinning import pinned, pinned_near, pins
from kvferry_fabric.topology.planning import CPU, Cpus, Share, Topology, cpus_for, domains_for, plan

__all__ = [
    "CPU",
    "Core",
    "Cpus",
    "Gpu",
    "LeftOut",
    "Machine",
    "Nearness",
    "Nic",
    "Share",
    "Topology",
    "TopologyError",
    "complete",
    "cpus_for",
    "detect",
    "domains_for",
    "draw",
    "pinned",
    "pinned_near",
    "pins",
    "plan",
    "read_file",
    "summary",
]
