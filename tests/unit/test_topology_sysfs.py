"""sysfs: the same machines laid out as Linux lays them out, and what only sysfs tells."""

import os
import stat
from pathlib import Path

import msgspec
import pytest
from kvferry_fabric.topology import TopologyError, complete, detect, plan, read_file
from kvferry_fabric.topology import sysfs as sysfs_module
from kvferry_fabric.topology.detection import LSTOPO
from kvferry_fabric.topology.sysfs import read

DATA = Path(__file__).parents[1] / "data/topology"
MACHINES = ["p5.48xlarge", "p5en.48xlarge", "dgx-h100", "laptop"]
CODES = {"InfiniBand": "0x020700", "Ethernet": "0x020000", "EFA": "0x020000", "": "0x028000"}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def link(place, target):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


def function(root, device, ids, code):
    """A PCI function in its place below its bridges, and in /sys/bus/pci/devices."""
    folder = root.joinpath("devices", *device.path, device.address)
    vendor, model = ids.split(":")
    for name, text in {"vendor": f"0x{vendor}", "device": f"0x{model}", "class": code}.items():
        write(folder / name, text)
    write(folder / "numa_node", -1 if device.numa is None else device.numa)
    link(root / "bus/pci/devices" / device.address, folder)
    return folder


def nic_function(root, nic):
    folder = function(root, nic, nic.ids, CODES["" if nic.wireless else nic.link_layer])
    if nic.rdma:
        port = folder / "infiniband" / nic.rdma / "ports/1"
        write(port / "link_layer", "Unspecified" if nic.link_layer == "EFA" else nic.link_layer)
        write(port / "rate", "400 Gb/sec (4X NDR)")
        write(port / "state", "4: ACTIVE" if nic.up else "1: DOWN")
        link(folder / "infiniband" / nic.rdma / "device", folder)
        link(root / "class/infiniband" / nic.rdma, folder / "infiniband" / nic.rdma)
    for name in nic.interfaces:
        write(folder / "net" / name / "operstate", "up")
        write(folder / "net" / name / "speed", "25000")
        link(folder / "net" / name / "device", folder)
        link(root / "class/net" / name, folder / "net" / name)
        if nic.wireless:
            (folder / "net" / name / "wireless").mkdir()
    return folder


def lay_out(root, machine):
    for core in machine.cores:
        siblings = ",".join(map(str, core.cpus))
        for cpu in core.cpus:
            write(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    for node in machine.nodes:
        cpus = ",".join(str(cpu) for core in machine.cores if core.numa == node for cpu in core.cpus)
        write(root / f"devices/system/node/node{node}/cpulist", cpus)
    (root / "devices/system/cpu/cpufreq").mkdir()
    for gpu in machine.gpus:
        function(root, gpu, "10de:2330", "0x030200")
    for nic in machine.nics:
        nic_function(root, nic)


@pytest.mark.parametrize("name", MACHINES)
def test_both_readers_agree_on_the_same_machine(tmp_path, name):
    recorded = read_file(DATA / f"{name}.xml")
    lay_out(tmp_path, recorded)
    linux = read(tmp_path)
    assert linux.notes == ()
    assert linux.cores == recorded.cores
    assert [(gpu.address, gpu.path, gpu.numa) for gpu in linux.gpus] == [
        (gpu.address, gpu.path, gpu.numa) for gpu in recorded.gpus
    ]
    told_by_both = ("address", "ids", "path", "numa", "rdma", "interfaces", "link_layer", "wireless")
    for ours, theirs in zip(linux.nics, recorded.nics, strict=True):
        assert [getattr(ours, field) for field in told_by_both] == [getattr(theirs, field) for field in told_by_both]
    shares = [(s.device, [n.name for n in s.nics], s.fabric_cores, s.nearness) for s in plan(linux).shares]
    assert shares == [(s.device, [n.name for n in s.nics], s.fabric_cores, s.nearness) for s in plan(recorded).shares]


def test_sysfs_adds_rates_and_link_states_to_what_hwloc_told(tmp_path):
    recorded = read_file(DATA / "dgx-h100.xml")
    lay_out(tmp_path, recorded)
    machine = complete(recorded, read(tmp_path))
    by_name = {nic.name: nic for nic in machine.nics}
    assert by_name["mlx5_0"].port_gbps == 400
    assert by_name["mlx5_0"].slot_gbps == 504.1
    assert by_name["mlx5_0"].model == "MT2910 Family [ConnectX-7]"
    assert by_name["mlx5_2"].up is False
    assert (by_name["eno3"].port_gbps, by_name["eno3"].up) == (25, True)
    assert machine.gpus == recorded.gpus


def test_a_hwloc_built_without_pci_gets_its_devices_from_sysfs(tmp_path):
    recorded = read_file(DATA / "p5.48xlarge.xml")
    lay_out(tmp_path, recorded)
    machine = complete(msgspec.structs.replace(recorded, gpus=(), nics=()), read(tmp_path))
    assert (len(machine.gpus), len(machine.nics)) == (8, 33)


def small(root):
    write(root / "devices/system/cpu/cpu0/topology/thread_siblings_list", "0")
    write(root / "devices/system/node/node0/cpulist", "0-1")
    recorded = read_file(DATA / "laptop.xml")
    return next(nic for nic in recorded.nics if not nic.wireless)


def test_an_interface_behind_virtio_is_found_and_one_without_hardware_is_not(tmp_path):
    nic = small(tmp_path)
    folder = function(tmp_path, nic, "1af4:1041", "0x020000")
    interface = folder / "virtio2/net/eth0"
    write(interface / "operstate", "unknown")
    write(interface / "speed", "-1")
    link(interface / "device", folder / "virtio2")
    link(tmp_path / "class/net/eth0", interface)
    write(tmp_path / "devices/virtual/net/lo/operstate", "unknown")
    link(tmp_path / "class/net/lo", tmp_path / "devices/virtual/net/lo")
    (found,) = read(tmp_path).nics
    assert (found.interfaces, found.port_gbps, found.up) == (("eth0",), None, None)


def test_the_only_node_of_a_machine_is_everybodys(tmp_path):
    nic_function(tmp_path, msgspec.structs.replace(small(tmp_path), numa=None))
    assert [nic.numa for nic in read(tmp_path).nics] == [0]


def test_the_pci_links_rate_is_after_encoding(tmp_path):
    nic = small(tmp_path)
    folder = nic_function(tmp_path, nic)
    for speed, width, gbps in [
        ("32.0 GT/s PCIe", "16", 504.1),
        ("5.0 GT/s PCIe", "4", 16.0),
        ("Unknown", "16", None),
        ("32.0 GT/s PCIe", "0", None),
        ("32.0 GT/s PCIe", "x", None),
    ]:
        write(folder / "current_link_speed", speed)
        write(folder / "current_link_width", width)
        assert read(tmp_path).nics[0].slot_gbps == gbps


def test_a_function_that_lacks_its_class_is_skipped_and_named(tmp_path):
    folder = nic_function(tmp_path, small(tmp_path))
    (folder / "class").unlink()
    machine = read(tmp_path)
    assert machine.nics == ()
    assert machine.notes == ("PCI function 0000:00:1f.6: skipped: class is ''",)


def test_cpus_of_an_unknown_topology_are_cores_of_their_own(tmp_path):
    write(tmp_path / "devices/system/cpu/online", "0-1,4")
    assert [(core.cpus, core.numa) for core in read(tmp_path).cores] == [((0,), None), ((1,), None), ((4,), None)]


def test_no_sysfs_is_an_error(tmp_path):
    with pytest.raises(TopologyError, match="tells of no CPU"):
        read(tmp_path)


def test_this_machine_can_be_read_and_planned():
    topology = plan(detect(), allowed=os.sched_getaffinity(0))
    allowed = os.sched_getaffinity(0)
    for share in topology.shares:
        assert {cpu for core in share.fabric_cores for cpu in core.cpus} <= allowed
    assert topology.machine.cores


def lstopo(folder, script):
    program = folder / LSTOPO
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_lstopo_is_used_where_it_is_installed_and_kept_off_gpu_drivers(tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    lstopo(tmp_path, f'echo "$HWLOC_COMPONENTS $*" > {seen}; exec cat {DATA / "laptop.xml"}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = detect()
    assert (machine.name, machine.source, len(machine.cores)) == ("Laptop", "hwloc, sysfs", 8)
    assert "-nvml" in seen.read_text()
    assert "--of xml" in seen.read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no permission >&2; exit 3", "ended with status 3: no permission"),
        ("echo '<html/>'", "not <topology>"),
        ("exec sleep 60", "timed out"),
    ],
)
def test_a_lstopo_that_fails_is_named_and_sysfs_is_read(tmp_path, monkeypatch, script, words):
    lstopo(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("kvferry_fabric.topology.detection.LSTOPO_SECONDS", 0.5)
    machine = detect()
    assert machine.cores == sysfs_module.read().cores
    assert words in machine.notes[-1]
    assert machine.notes[-1].endswith("sysfs was read instead")
