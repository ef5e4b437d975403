"""Planning on machines made up for one trait each."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_fabric.topology import Core, Gpu, Machine, Nearness, Nic, TopologyError, cpus_for, domains_for, draw, plan

HOST = "pci0000:{:02x}"


def gpu(bus, *path, numa=0):
    return Gpu(address=f"0000:{bus:02x}:00.0", model="G", path=path, numa=numa)


def nic(bus, *path, numa=0, **more):
    known = {"ids": "15b3:1021", "rdma": f"mlx5_{bus}", "link_layer": "InfiniBand", "port_gbps": 400.0, "up": True}
    return Nic(address=f"0000:{bus:02x}:00.0", path=path, numa=numa, **(known | more))


def machine(gpus=(), nics=(), cores=8, nodes=1):
    made = tuple(Core(cpus=(i,), numa=i * nodes // cores) for i in range(cores))
    return Machine(source="made up", cores=made, gpus=tuple(gpus), nics=tuple(nics))


def domains(topology):
    return [domains_for(topology, share.device) for share in topology.shares]


def reasons(topology):
    return {left.nic.name: left.reason for left in topology.left_out}


def test_gpus_that_share_a_switch_with_fewer_nics_use_one_together():
    switch = ("pci0000:10", "0000:10:01.0")
    topology = plan(
        machine([gpu(bus, *switch) for bus in (0x20, 0x21, 0x22, 0x23)], [nic(1, *switch), nic(2, *switch)])
    )
    assert domains(topology) == [("mlx5_1",), ("mlx5_1",), ("mlx5_2",), ("mlx5_2",)]
    assert "mlx5_1  verbs  400 Gb/s, shared with 0000:21:00.0" in draw(topology)


def test_the_deeper_switch_is_nearer():
    outer = ("pci0000:10", "0000:10:01.0")
    near, far = nic(2, *outer, "0000:11:00.0"), nic(1, *outer)
    topology = plan(machine([gpu(0x20, *outer, "0000:11:00.0")], [far, near]))
    assert domains(topology) == [("mlx5_2",)]
    assert reasons(topology) == {"mlx5_1": "every GPU has a nearer NIC"}


def test_nearness_is_switch_then_host_bridge_then_numa_then_anything():
    one = gpu(0x20, "pci0000:10", "0000:10:01.0", numa=0)
    switch = nic(1, "pci0000:10", "0000:10:01.0", numa=0)
    bridge = nic(2, "pci0000:10", "0000:10:02.0", numa=0)
    node = nic(3, "pci0000:30", numa=0)
    far = nic(4, "pci0000:80", numa=1)
    for nics, nearness in [
        ([far, node, bridge, switch], Nearness.SWITCH),
        ([far, node, bridge], Nearness.HOST_BRIDGE),
        ([far, node], Nearness.NUMA),
        ([far], Nearness.SYSTEM),
    ]:
        (share,) = plan(machine([one], nics, nodes=2)).shares
        assert (share.nics, share.nearness) == ((nics[-1],), nearness)


def test_a_gpu_without_a_switch_takes_what_is_free_before_it_shares():
    switch = ("pci0000:10", "0000:10:01.0")
    gpus = [gpu(0x20, *switch), gpu(0x40, "pci0000:40", "0000:40:01.0")]
    nics = [nic(1, *switch), nic(2, "pci0000:50", "0000:50:01.0")]
    assert domains(plan(machine(gpus, nics))) == [("mlx5_1",), ("mlx5_2",)]
    assert domains(plan(machine(gpus, nics[:1]))) == [("mlx5_1",), ("mlx5_1",)]


def test_few_fast_nics_win_over_many_slow_ones():
    fast = [nic(bus, "pci0000:10") for bus in (1, 2)]
    slow = [nic(bus, "pci0000:10", port_gbps=25.0, ids="15b3:1015", link_layer="Ethernet") for bus in (3, 4, 5, 6)]
    topology = plan(machine([gpu(0x20, "pci0000:10")], fast + slow))
    assert domains(topology) == [("mlx5_1", "mlx5_2")]
    assert "it is Ethernet 15b3:1015 25 Gb/s; 2 others are InfiniBand 15b3:1021 400 Gb/s" in reasons(topology)["mlx5_3"]


def test_a_nic_of_the_same_model_at_another_rate_is_odd():
    nics = [nic(bus, "pci0000:10", port_gbps=200.0 if bus == 2 else 400.0) for bus in (1, 2, 3)]
    assert set(reasons(plan(machine([gpu(0x20, "pci0000:10")], nics)))) == {"mlx5_2"}


def test_a_nic_whose_link_is_down_is_replaced_by_the_next_nearest():
    nics = [nic(1, "pci0000:10", "0000:10:01.0", up=False), nic(2, "pci0000:10", "0000:10:02.0")]
    topology = plan(machine([gpu(0x20, "pci0000:10", "0000:10:01.0")], nics))
    assert domains(topology) == [("mlx5_2",)]
    assert reasons(topology) == {"mlx5_1": "its link is down"}


def test_without_nics_every_gpu_still_has_cores():
    topology = plan(machine([gpu(0x20, "pci0000:10"), gpu(0x21, "pci0000:10")]))
    assert domains(topology) == [(), ()]
    assert [cpus_for(topology, share.device).fabric for share in topology.shares] == [{3}, {7}]
    assert "NICs: none" in draw(topology)


def test_a_gpu_of_an_unknown_node_gets_cores_beside_its_nic_and_a_note():
    topology = plan(machine([gpu(0x20, "pci0000:10", numa=None)], [nic(1, "pci0000:10", numa=1)], nodes=2))
    assert topology.shares[0].numa == 1
    assert topology.notes == ("GPU 0000:20:00.0: its NUMA node is unknown; it gets cores of node 1",)


def test_a_node_whose_cores_are_not_allowed_is_not_used():
    topology = plan(machine([gpu(0x20, "pci0000:10", numa=1)], nodes=2), allowed={0, 1, 2})
    assert cpus_for(topology, "0000:20:00.0").fabric == {2}
    assert topology.notes == (
        "3 of 8 cores may be used by this process",
        "GPU 0000:20:00.0: its NUMA node (1) has no core that may be used; it gets cores of node 0",
    )


def test_no_allowed_core_is_an_error():
    with pytest.raises(TopologyError, match=r"none of the machine's cores .* \(100-101\)"):
        plan(machine(), allowed={100, 101})


def test_one_core_serves_everything():
    cpus = cpus_for(plan(machine(cores=1)))
    assert cpus.fabric == cpus.workers == {0}


def test_a_plan_survives_json():
    topology = plan(machine([gpu(0x20, "pci0000:10")], [nic(1, "pci0000:10")]))
    assert msgspec.json.decode(msgspec.json.encode(topology), type=type(topology)) == topology


@settings(max_examples=100, deadline=None)
@given(
    gpus=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=8),
    nics=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.sampled_from([100.0, 400.0])), max_size=12),
    cores=st.integers(2, 24),
)
def test_whatever_the_machine_every_nic_is_used_or_left_out_and_load_is_even(gpus, nics, cores):
    # Four host bridges, two to a node, each with two switches.
    def place(bridge, switch):
        return HOST.format(bridge * 16), f"0000:{bridge * 16:02x}:{switch:02x}.0"

    made = machine(
        [gpu(0x80 + i, *place(b, s), numa=b // 2) for i, (b, s) in enumerate(gpus)],
        [nic(i, *place(b, s), numa=b // 2, port_gbps=rate) for i, (b, s, rate) in enumerate(nics)],
        cores=cores,
        nodes=2,
    )
    topology = plan(made)
    used = {one.address for share in topology.shares for one in share.nics}
    assert used.isdisjoint(left.nic.address for left in topology.left_out)
    assert used | {left.nic.address for left in topology.left_out} == {one.address for one in made.nics}
    for share in topology.shares:
        assert bool(share.nics) == bool(made.nics)
        assert share.worker_cores
    for together in ({i for i, g in enumerate(gpus) if g == one} for one in set(gpus)):
        counts = [len(topology.shares[i].nics) for i in together]
        assert max(counts) - min(counts) <= 1
    assert draw(topology)
