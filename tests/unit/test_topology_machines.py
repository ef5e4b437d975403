"""Recorded machines: who uses what on a p5, a p5en, a DGX H100 and a laptop."""

from collections import Counter
from pathlib import Path

import pytest
from kvferry_fabric.topology import (
    Nearness,
    TopologyError,
    cpus_for,
    domains_for,
    draw,
    plan,
    read_file,
    summary,
)

DATA = Path(__file__).parents[1] / "data/topology"
GPU_MACHINES = ["p5.48xlarge", "p5en.48xlarge", "dgx-h100"]

# GPU -> RDMA devices, as these machines' makers document them.
P5 = {
    f"0000:{first + 4:02x}:00.0": [f"rdmap{first + k}s0-rdm" for k in range(4)]
    for first in (79, 96, 113, 130, 147, 164, 181, 198)
}
P5EN = {
    f"0000:{first + 4 + k:02x}:00.0": [f"rdmap{first + 2 * k}s0-rdm", f"rdmap{first + 2 * k + 1}s0-rdm"]
    for first in (85, 110, 135, 160)
    for k in (0, 1)
}
DGX = {
    "0000:1b:00.0": ["mlx5_0"],
    "0000:43:00.0": ["mlx5_3"],
    "0000:52:00.0": ["mlx5_4"],
    "0000:61:00.0": ["mlx5_5"],
    "0000:9d:00.0": ["mlx5_6"],
    "0000:c3:00.0": ["mlx5_9"],
    "0000:d1:00.0": ["mlx5_10"],
    "0000:df:00.0": ["mlx5_11"],
}


def planned(name, **how):
    return plan(read_file(DATA / f"{name}.xml"), **how)


@pytest.mark.parametrize(("name", "expected"), [("p5.48xlarge", P5), ("p5en.48xlarge", P5EN), ("dgx-h100", DGX)])
def test_each_gpu_uses_the_nics_below_its_switch(name, expected):
    topology = planned(name)
    assert {share.device: list(domains_for(topology, share.device)) for share in topology.shares} == expected
    assert all(share.nearness is Nearness.SWITCH for share in topology.shares)


@pytest.mark.parametrize(("name", "cores"), [("p5.48xlarge", 12), ("p5en.48xlarge", 12), ("dgx-h100", 14)])
def test_cores_of_a_numa_node_are_shared_out_among_its_gpus_and_none_twice(name, cores):
    topology = planned(name)
    used = Counter()
    for place, share in enumerate(topology.shares):
        mine = {*share.fabric_cores, *share.worker_cores}
        assert len(mine) == cores
        assert len(share.fabric_cores) == 1
        assert share.fabric_cores[0] not in share.worker_cores
        assert {core.numa for core in mine} == {share.numa} == {place // 4}
        assert all(len(core.cpus) == 2 for core in mine)
        used.update(cpu for core in mine for cpu in core.cpus)
    assert sorted(used) == sorted(cpu for core in topology.machine.cores for cpu in core.cpus)
    assert set(used.values()) == {1}


def test_cpus_to_pin_to_are_whole_cores_of_the_gpu():
    topology = planned("p5.48xlarge")
    cpus = cpus_for(topology, "00000000:53:00.0")  # the form that CUDA's management library gives
    assert cpus.fabric == {11, 107}
    assert cpus.workers == {*range(11), *range(96, 107)}
    with pytest.raises(TopologyError, match=r"no device 0000:54:00.0 here, only 0000:53:00.0, "):
        cpus_for(topology, "0000:54:00.0")
    with pytest.raises(TopologyError, match="no PCI address"):
        cpus_for(topology, "cuda:0")


def test_storage_and_management_nics_of_a_dgx_are_left_out_each_with_a_reason():
    reasons = {left.nic.name: left.reason for left in planned("dgx-h100").left_out}
    assert set(reasons) == {"mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8", "eno3", "eno4"}
    assert "it is Ethernet MT2910" in reasons["mlx5_1"]
    assert "8 others are InfiniBand" in reasons["mlx5_1"]
    assert reasons["mlx5_2"] == "its link is down"
    assert reasons["eno3"] == "no RDMA, which 10 others have"


def test_storage_nics_of_the_very_same_kind_are_left_out_for_being_farther(tmp_path):
    text = (DATA / "dgx-h100.xml").read_text()
    text = text.replace("0200 [15b3:1021]", "0207 [15b3:1021]").replace(
        '"Port1State" value="1"', '"Port1State" value="4"'
    )
    (tmp_path / "dgx.xml").write_text(text)
    topology = plan(read_file(tmp_path / "dgx.xml"))
    assert {share.device: list(domains_for(topology, share.device)) for share in topology.shares} == DGX
    reasons = {left.nic.name: left.reason for left in topology.left_out}
    assert {reasons[f"mlx5_{k}"] for k in (1, 2, 7, 8)} == {"every GPU has a nearer NIC"}


def test_a_laptop_has_no_gpu_and_sends_over_its_cable():
    topology = planned("laptop")
    (share,) = topology.shares
    assert domains_for(topology) == ("enp0s31f6",)
    assert share.nics[0].provider == "tcp"
    assert [(left.nic.name, left.reason) for left in topology.left_out] == [
        ("wlp0s20f3", "wireless, and there is one with a cable")
    ]
    assert cpus_for(topology).fabric == cpus_for(topology).workers == set(range(16))


def test_a_laptop_without_a_cable_sends_over_the_air(tmp_path):
    text = (DATA / "laptop.xml").read_text().replace('"enp0s31f6"', '""')
    (tmp_path / "laptop.xml").write_text(text)
    topology = plan(read_file(tmp_path / "laptop.xml"))
    assert domains_for(topology) == ("wlp0s20f3",)
    assert [left.reason for left in topology.left_out] == ["no driver has claimed it"]


def test_tcp_on_an_efa_machine_takes_the_network_interfaces():
    topology = planned("p5en.48xlarge", provider="tcp")
    # Two below each switch of the first socket, one below each of the second: the two GPUs there share it.
    used = [domain for share in topology.shares for domain in domains_for(topology, share.device)]
    assert used == [f"enp{bus}s0" for bus in (71, 72, 96, 97, 121, 121, 146, 146)]
    assert {left.reason for left in topology.left_out} == {"tcp can't drive it"}
    assert "enp121s0  tcp  PCIe 252.1 Gb/s, shared with 0000:8c:00.0" in draw(topology)


@pytest.mark.parametrize("name", GPU_MACHINES)
def test_the_host_pool_of_a_gpu_machine_takes_all_nics_and_cores(name):
    topology = planned(name, cpu_pool=True)
    gpus = planned(name)
    assert set(topology.share().nics) >= {nic for share in gpus.shares for nic in share.nics}
    cpus = cpus_for(topology)
    assert len(cpus.fabric | cpus.workers) == sum(len(core.cpus) for core in topology.machine.cores)


@pytest.mark.parametrize("name", [*GPU_MACHINES, "laptop"])
def test_the_drawing_names_every_device_and_nic_once(name):
    topology = planned(name)
    text = draw(topology)
    lines = text.splitlines()
    assert summary(topology) in lines[0]
    for share in topology.shares:
        assert sum(share.device in line for line in lines) == (1 if share.device != "cpu" else 0)
    for nic in topology.machine.nics:
        names = {nic.domain(), nic.name}
        assert sum(any(word in names for word in line.split()) for line in lines) == 1
    for left in topology.left_out:
        assert any(left.nic.address in line and left.reason in line for line in lines)


def test_the_drawing_of_a_laptop_reads_so():
    assert draw(planned("laptop")).splitlines() == [
        "Laptop (laptop.xml): no GPU, 1 NIC in use (tcp), 1 left out, 8 cores on 1 NUMA node",
        "NUMA node 0: 8 cores, CPUs 0-15",
        "└─ CPU pool",
        "      NICs: same NUMA node",
        "        enp0s31f6  tcp",
        "      8 cores: the fabric's thread on CPUs 0-15, as all",
        "Where the fabric's thread of a node is pinned, its pool being in host memory",
        "└─ nowhere: all cores are as near",
        "NICs left out",
        "└─ wlp0s20f3 at 0000:00:14.3: wireless, and there is one with a cable",
    ]
