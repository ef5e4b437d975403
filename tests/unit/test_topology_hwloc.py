"""hwloc's XML: what is refused, what is skipped and named, and the dialects of its versions."""

from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kvferry_fabric.topology import TopologyError, plan, read_file
from kvferry_fabric.topology.cpuset import from_list, from_mask, to_list
from kvferry_fabric.topology.hwloc import read
from kvferry_fabric.topology.safexml import MOST_BYTES, MOST_DEPTH

CPU = '<object type="PU" os_index="0" cpuset="0x1"/>'


def topology(inside, version="2.0", more=""):
    return (
        f'<topology version="{version}"><object type="Machine" cpuset="0x1">{inside}</object>{more}</topology>'.encode()
    )


def device(inside="", bus="0000:01:00.0", kind="0207 [15b3:1021] [0:0] 00", more=""):
    return f'<object type="PCIDev" pci_busid="{bus}" pci_type="{kind}" {more}>{inside}</object>'


BOMB = b"""<!DOCTYPE topology [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<topology><object type="&b;"/></topology>"""
FETCH = b'<!DOCTYPE topology [<!ENTITY x SYSTEM "file:///etc/passwd">]><topology>&x;</topology>'
PARAMETER = b'<!DOCTYPE topology [<!ENTITY % x SYSTEM "http://192.0.2.1/x.dtd"> %x;]><topology/>'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not well-formed XML: no element found"),
        (b"\x00\x01\x02", "not well-formed"),
        (b"<topology><object>", "not well-formed"),
        (b'<?xml version="1.0" encoding="no-such"?><topology/>', "not well-formed XML: unknown encoding"),
        (b'<?xml version="1.0" encoding="shift-jis"?><topology/>', "not well-formed XML"),
        (BOMB, "declares the entity 'a'"),
        (FETCH, "declares the entity 'x'"),
        (PARAMETER, "declares the entity 'x'"),
        (b"<html/>", "the root element is <html>, not <topology>"),
        (b"<topology/>", "it has no CPUs"),
        (topology("<object/>"), r"it has no CPUs; 1 objects of the unknown type \(none\)"),
        (topology('<object type="Core"/>'), "it has no CPUs; Core without a name: skipped: it has no PU"),
        (b"<a>" * (MOST_DEPTH + 1), f"nested deeper than {MOST_DEPTH}"),
    ],
)
def test_what_is_no_topology_is_refused_with_the_reason(data, words):
    with pytest.raises(TopologyError, match=f"^it.xml: .*{words}"):
        read(data, "it.xml")


def test_a_file_too_large_or_absent_is_refused(tmp_path):
    with (tmp_path / "large.xml").open("wb") as file:
        file.truncate(MOST_BYTES + 5)
    with pytest.raises(TopologyError, match="too many"):
        read_file(tmp_path / "large.xml")
    with pytest.raises(TopologyError, match="No such file"):
        read_file(tmp_path / "none.xml")


@pytest.mark.parametrize(
    ("faulty", "note"),
    [
        ('<object type="PCIDev" pci_type="0207 [15b3:1021]"/>', "PCIDev without a name: skipped: it has no pci_busid"),
        (
            '<object type="PCIDev" pci_busid="0000:09:00.0"/>',
            "PCIDev pci_busid=0000:09:00.0: skipped: it has no pci_type",
        ),
        (device(bus="9"), "PCIDev pci_busid=9: skipped: '9' is no PCI address"),
        (device(kind="what"), "PCIDev pci_busid=0000:01:00.0: skipped: pci_type is 'what'"),
        ('<object type="PU" cpuset="0x2"/>', "PU without a name: skipped: it has no os_index"),
        ('<object type="PU" os_index="-1"/>', "PU os_index=-1: skipped: os_index is '-1'"),
        ('<object type="NUMANode" os_index="3"/>', "NUMANode os_index=3: skipped: it has no cpuset"),
        (
            '<object type="NUMANode" os_index="3" cpuset="0xf...f"/>',
            "NUMANode os_index=3: skipped: '0xf...f' is no CPU set",
        ),
        ('<object type="Bridge" bridge_type="0-1"/>', "Bridge without a name: skipped: it has no bridge_pci"),
        ('<object type="Bridge" bridge_pci="x"/>', "Bridge without a name: skipped: bridge_pci is 'x'"),
        ('<object type="Quantum"/>' * 2, "2 objects of the unknown type Quantum"),
    ],
)
def test_a_faulty_object_is_skipped_and_named_and_the_others_are_taken(faulty, note):
    rdma = '<object type="OSDev" name="mlx5_0" osdev_type="3"/>'
    machine = read(topology(faulty + CPU + device(rdma, "0000:02:00.0")))
    assert machine.notes == (note,)
    assert [core.cpus for core in machine.cores] == [(0,)]
    assert [nic.rdma for nic in machine.nics] == ["mlx5_0"]
    assert plan(machine).notes == (note,)


def test_what_is_inside_an_unknown_object_is_taken():
    machine = read(topology(f'<object type="Chiplet" cpuset="0x1">{CPU}</object>'))
    assert len(machine.cores) == 1
    assert machine.notes == ("1 objects of the unknown type Chiplet",)


def test_elements_that_are_not_objects_are_passed_over():
    assert read(topology(CPU + "<userdata>x</userdata>", more='<support name="x"/><cpukind cpuset="0x1"/>')).notes == ()


@pytest.mark.parametrize(("version", "network", "rdma"), [("2.0", "2", "3"), ("1.0", "2", "3"), ("3.0", "16", "32")])
def test_every_version_numbers_its_devices(version, network, rdma):
    inside = (
        f'<object type="OSDev" name="ib0" osdev_type="{network}"/><object type="OSDev" name="m0" osdev_type="{rdma}"/>'
    )
    (nic,) = read(topology(CPU + device(inside), version)).nics
    assert (nic.rdma, nic.interfaces, nic.link_layer) == ("m0", ("ib0",), "InfiniBand")


def test_rates_that_are_no_numbers_or_zero_are_unknown():
    for told, known in [("63.015385", 504.1), ("0.000000", None), ("fast", None), ("nan", None), ("inf", None)]:
        (nic,) = read(topology(CPU + device(more=f'pci_link_speed="{told}"'))).nics
        assert nic.slot_gbps == known


def test_locality_comes_from_the_nearest_object_with_cpus_and_the_whole_machine_says_nothing():
    node = '<object type="NUMANode" os_index="{}" cpuset="{}"/><object type="PU" os_index="{}" cpuset="{}"/>{}'
    package = '<object type="Package" cpuset="{}">' + node + "</object>"
    first = package.format("0x1", 0, "0x1", 0, "0x1", device(bus="0000:01:00.0"))
    second = package.format("0x2", 1, "0x2", 1, "0x2", device(bus="0000:02:00.0"))
    text = topology(first + second + device(bus="0000:03:00.0")).replace(
        b'Machine" cpuset="0x1"', b'Machine" cpuset="0x3"'
    )
    machine = read(text)
    assert [nic.numa for nic in machine.nics] == [0, 1, None]
    assert [core.numa for core in machine.cores] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "is_gpu"),
    [
        ("0302 [10de:2330]", True),
        ("0300 [10de:2684]", True),
        ("1200 [1002:74a1]", True),
        ("0300 [8086:9a60]", False),
        ("0300 [1a03:2000]", False),
        ("0680 [10de:22a3]", False),  # an NVSwitch
    ],
)
def test_gpus_are_what_computes(kind, is_gpu):
    assert bool(read(topology(CPU + device(kind=f"{kind} [0:0] 00"))).gpus) is is_gpu


DATA = sorted((Path(__file__).parents[1] / "data/topology").glob("*.xml"))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_but_never_breaks(data):
    text = data.draw(st.sampled_from([path.read_bytes() for path in DATA if path.name == "laptop.xml"]))
    start = data.draw(st.integers(0, len(text)))
    damage = data.draw(st.binary(max_size=20) | st.sampled_from([b'"', b"<", b'="', b"0x", b"object", b"-1"]))
    try:
        plan(read(text[:start] + damage + text[start + data.draw(st.integers(0, 200)) :]))
    except TopologyError:
        event("refused")


@settings(deadline=None)
@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_cpu_sets_are_read_in_both_forms(cpus):
    words = max(cpus) // 32 + 1
    mask = sum(1 << cpu for cpu in cpus)
    parts = [mask >> 32 * i & 0xFFFFFFFF for i in reversed(range(words))]
    assert (
        from_mask(
            ",".join(f"0x{part:08x}" if part else "" for part in parts[:-1]) + ("," * (words > 1)) + hex(parts[-1])
        )
        == cpus
    )
    assert from_list(to_list(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "0x", "x", "0x1;", "0xf...f", "0x1 0x2", "0x100000000"])
def test_what_is_no_mask_is_refused(text):
    if text == "0x":
        assert from_mask(text) == frozenset()
        return
    with pytest.raises(TopologyError):
        from_mask(text)


@pytest.mark.parametrize("text", ["x", "3-1", "1-99999999", "0-999999", "-1", "1--2"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(TopologyError):
        from_list(text)
