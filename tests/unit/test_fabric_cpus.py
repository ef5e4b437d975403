"""Where the fabric's thread is pinned: recorded machines, networks made up, and the setting."""

import os
from pathlib import Path

import pytest
from kvferry_engine import fabric_cpus as setting
from kvferry_fabric import FabricError, default_cpus
from kvferry_fabric.interfaces import hardware_below, interface_of
from kvferry_fabric.topology import TopologyError, draw, pinned, pinned_near, pins, plan, read_file
from kvferry_fabric.topology.cpuset import from_list
from kvferry_prefiller.settings import PrefillerSettings

DATA = Path(__file__).parents[1] / "data/topology"
P5_NODES = {0: from_list("0-47,96-143"), 1: from_list("48-95,144-191")}
DGX_NODES = {0: from_list("0-55,112-167"), 1: from_list("56-111,168-223")}
SETTINGS = {"model": "/m", "host": "127.0.0.1"}


def machine(name):
    return read_file(DATA / f"{name}.xml")


def near(name, *nics, **planned):
    return pinned_near(plan(machine(name), **planned), lambda nic: nic.name in nics)


@pytest.mark.parametrize(("name", "nodes"), [("p5.48xlarge", P5_NODES), ("dgx-h100", DGX_NODES), ("laptop", {})])
def test_a_pool_in_host_memory_is_served_from_the_node_of_its_nics(name, nodes):
    topology = plan(machine(name))
    assert pins(topology) == nodes
    for nic in topology.machine.nics:
        if nic.name not in {left.nic.name for left in topology.left_out}:
            assert near(name, nic.name) == nodes.get(nic.numa, frozenset())


def test_nics_that_are_not_opened_have_no_say():
    assert near("dgx-h100", "mlx5_6", "mlx5_9") == DGX_NODES[1]
    assert near("dgx-h100") == frozenset()


def test_only_allowed_cpus_are_named_and_none_if_the_node_has_no_such():
    assert near("dgx-h100", "mlx5_6", allowed={3, 60, 61}) == {60, 61}
    assert near("dgx-h100", "mlx5_6", allowed={3, 4}) == frozenset()


def test_a_gpu_has_a_core_for_its_fabric():
    assert pinned(plan(machine("p5.48xlarge")), "0000:53:00.0") == {11, 107}
    assert pinned(plan(machine("laptop"))) == frozenset()


def test_the_drawing_says_what_is_pinned_where():
    lines = draw(plan(machine("dgx-h100"))).splitlines()
    assert "├─ with NICs of NUMA node 0: CPUs 0-55,112-167" in lines
    assert "└─ with NICs of NUMA node 1: CPUs 56-111,168-223" in lines


@pytest.fixture
def all_allowed(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: frozenset(range(1024)))


@pytest.fixture
def addresses(monkeypatch):
    """Interfaces of a p5en, by address; 10.0.0.3 is not of this host."""
    known = {"10.0.0.1": "enp71s0", "10.0.0.2": "enp146s0", "127.0.0.1": "lo"}
    monkeypatch.setattr(default_cpus, "choose", lambda provider, _: "tcp" if provider == "auto" else provider)
    monkeypatch.setattr(default_cpus, "interface_of", known.get)
    monkeypatch.setattr(default_cpus, "hardware_below", lambda name: frozenset({name} - {"lo"}))


@pytest.mark.usefixtures("all_allowed", "addresses")
@pytest.mark.parametrize(
    ("provider", "binds", "node"),
    [
        ("auto", ["10.0.0.1"], 0),
        ("tcp", ["10.0.0.2"], 1),
        ("net", ["10.0.0.2", "10.0.0.1"], 0),
        ("tcp", ["127.0.0.1", "10.0.0.2"], 1),
        ("efa", ["127.0.0.1"], 0),
        ("tcp", ["127.0.0.1"], None),
        ("tcp", ["10.0.0.3"], None),
        ("shm", ["10.0.0.1"], None),
        ("local", ["10.0.0.1"], None),
    ],
)
def test_by_default_the_nics_that_are_opened_tell(provider, binds, node):
    found = default_cpus.default_cpus(provider, binds, lambda: machine("p5en.48xlarge"))
    assert found == P5_NODES.get(node, frozenset())


def test_an_address_leads_to_its_interface():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_bonds_and_vlans_lead_to_the_nics_below_and_what_is_virtual_to_none(tmp_path):
    for name in ("eth0/device", "eth1/device", "lo", "bond0/lower_eth0", "bond0/lower_eth1", "bond0.7/lower_bond0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "loop/lower_loop").mkdir(parents=True)
    assert hardware_below("eth0", tmp_path) == {"eth0"}
    assert hardware_below("bond0.7", tmp_path) == {"eth0", "eth1"}
    assert hardware_below("lo", tmp_path) == hardware_below("loop", tmp_path) == frozenset()


@pytest.mark.parametrize(("given", "cpus"), [("none", set()), ("0-2,8", {0, 1, 2, 8}), ("7", {7}), ("", {42})])
def test_the_setting_goes_before_the_topology(monkeypatch, given, cpus):
    monkeypatch.setattr(setting, "default_cpus", lambda provider, hosts: frozenset({42}))
    assert setting.fabric_cpus(PrefillerSettings(**SETTINGS, fabric_cpus=given)) == cpus


def test_a_topology_that_cannot_be_read_pins_nothing(monkeypatch):
    def fail(provider, hosts):
        msg = "no CPU"
        raise TopologyError(msg)

    monkeypatch.setattr(setting, "default_cpus", fail)
    assert setting.fabric_cpus(PrefillerSettings(**SETTINGS)) == frozenset()


def test_a_range_that_runs_backwards_is_an_error():
    with pytest.raises(FabricError, match="'5-3' is no list of CPUs"):
        setting.fabric_cpus(PrefillerSettings(**SETTINGS, fabric_cpus="5-3"))
