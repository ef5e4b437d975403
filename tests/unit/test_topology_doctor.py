"""`kvferry doctor` and the topology: a finding, a drawing, JSON."""

from pathlib import Path

import click.testing
import msgspec
import orjson
import pytest
from kvferry.cli.doctor import command, topology
from kvferry_fabric import checks
from kvferry_fabric.huge_pages import HugePages
from kvferry_fabric.topology import TopologyError, plan, read_file

DATA = Path(__file__).parents[1] / "data/topology"


def doctor(*args):
    return click.testing.CliRunner().invoke(command.command, args)


def finding(monkeypatch, here):
    monkeypatch.setattr(checks, "_here", here)
    (found,) = (one for one in checks.findings() if one["name"] == "topology")
    return found


def changed(tmp_path, name, *swaps):
    text = (DATA / name).read_text()
    for old, new in swaps:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / name).write_text(text)
    return plan(read_file(tmp_path / name))


def test_the_finding_says_what_there_is(monkeypatch):
    found = finding(monkeypatch, lambda: plan(read_file(DATA / "p5.48xlarge.xml")))
    assert found["level"] == "ok"
    assert found["text"].startswith("8 GPUs, 32 NICs in use (efa, PCIe 126 Gb/s), 1 left out, 96 cores on 2 NUMA nodes")


def test_the_finding_of_this_machine_is_made():
    assert [one["name"] for one in checks.findings()] == ["fabric extension", "topology", "huge pages"]


@pytest.mark.parametrize(
    ("found", "level", "text"),
    [
        (
            HugePages(2 << 20, 512, 500, transparent=False),
            "ok",
            "500 of 512 reserved ones of 2 MiB free",
        ),
        (
            HugePages(2 << 20, 0, 0, transparent=True),
            "ok",
            "transparent ones on request",
        ),
        (HugePages(2 << 20, 512, 0, transparent=False), "warn", "0 of 512 reserved ones"),
        (HugePages(0, 0, 0, transparent=False), "warn", "0 of 0 reserved ones of 0 MiB free"),
    ],
)
def test_huge_pages_are_a_finding(found, level, text):
    finding = checks.huge_pages_for_pools(found)
    assert finding["level"] == level
    assert text in finding["text"]
    assert ("shmem_enabled" in finding["advice"]) == (level == "warn")


def test_a_topology_that_cannot_be_read_is_a_warning_with_advice(monkeypatch):
    def fail():
        msg = "no CPU"
        raise TopologyError(msg)

    found = finding(monkeypatch, fail)
    assert (found["level"], found["text"]) == ("warn", "no CPU")
    assert "hwloc-nox" in found["advice"]


def test_a_nic_that_no_driver_has_claimed_is_a_warning(monkeypatch, tmp_path):
    topology_ = changed(tmp_path, "p5.48xlarge.xml", ('name="rdmap79s0"', 'name=""'))
    found = finding(monkeypatch, lambda: topology_)
    assert found["level"] == "warn"
    assert "no RDMA driver has claimed 0000:4f:00.0" in found["advice"]


def test_a_gpu_far_from_every_nic_is_a_warning(monkeypatch):
    machine = read_file(DATA / "dgx-h100.xml")
    nics = tuple(nic for nic in machine.nics if nic.numa == 0)
    found = finding(monkeypatch, lambda: plan(msgspec.structs.replace(machine, nics=nics)))
    assert found["level"] == "warn"
    assert "0000:9d:00.0, 0000:c3:00.0, 0000:d1:00.0, 0000:df:00.0;" in found["advice"]


def test_doctor_draws_this_machine_and_recorded_ones():
    result = doctor("--topology")
    assert result.exit_code == 0
    assert "NUMA node" in result.output
    result = doctor("--topology-file", str(DATA / "dgx-h100.xml"))
    assert result.exit_code == 0
    assert "GPU 0000:1b:00.0" in result.output
    assert "mlx5_1 at 0000:29:00.0: it is Ethernet" in result.output


def test_doctor_gives_the_plan_as_json():
    result = doctor("--topology-file", str(DATA / "p5en.48xlarge.xml"), "--json")
    shares = orjson.loads(result.output)["shares"]
    assert [len(share["nics"]) for share in shares] == [2] * 8


def test_doctor_says_why_a_file_cannot_be_read(tmp_path):
    (tmp_path / "x.xml").write_text("<html/>")
    result = doctor("--topology-file", str(tmp_path / "x.xml"))
    assert result.exit_code == 1
    assert "x.xml: the root element is <html>" in result.output


@pytest.mark.parametrize(
    ("modules", "words"), [([], "kvferry[worker]"), (["no_such_module"], "no_such_module can't be loaded")]
)
def test_doctor_without_the_fabric_says_what_to_install(monkeypatch, modules, words):
    monkeypatch.setattr(topology, "_modules", lambda: modules)
    result = doctor("--topology")
    assert result.exit_code == 1
    assert words in result.output
