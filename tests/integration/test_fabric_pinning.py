"""The fabric's thread runs where it was pinned to, from before it opens anything."""

import os
from contextlib import suppress
from pathlib import Path

import fabric_rig as rig
import pytest
from kvferry_fabric import EventKind, FabricError, TransferEngine
from kvferry_fabric.topology.cpuset import from_list

ALLOWED = os.sched_getaffinity(0)
NAME = "kvferry-fabric"


def threads() -> dict[str, frozenset[int]]:
    """CPUs that each of the fabric's threads in this process may run on."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread of an earlier test that ends meanwhile
            if (task / "comm").read_text().strip() != NAME:
                continue
            lines = (task / "status").read_text().splitlines()
            found[task.name] = next(
                from_list(line.split()[1]) for line in lines if line.startswith("Cpus_allowed_list")
            )
    return found


@pytest.mark.parametrize("provider", rig.PROVIDERS)
def test_the_thread_runs_on_its_cpus_alone_and_its_opener_everywhere(provider) -> None:
    before = threads()
    for cpus in ({min(ALLOWED)}, {max(ALLOWED)}, ALLOWED):
        with TransferEngine(provider, incarnation=1, bind=rig.BIND, cpus=cpus):
            assert [seen for thread, seen in threads().items() if thread not in before] == [cpus]
            assert os.sched_getaffinity(0) == ALLOWED


def test_a_pinned_engine_moves_pages() -> None:
    pair = rig.Pair(rig.PROVIDERS[0], cpus={min(ALLOWED)})
    source, target = pair.permuted(10)
    pair.sender.schedule_layers(pair.chunk(source, target, counter=None))
    assert rig.end_of(pair.sender).kind is EventKind.DONE
    assert (pair.target == pair.expected(source, target)).all()
    pair.close()


def missing() -> int:
    """A CPU that the kernel does not have."""
    return max(from_list(Path("/sys/devices/system/cpu/possible").read_text())) + 1


@pytest.mark.parametrize("beside", [set(), {min(ALLOWED)}])
def test_a_cpu_that_is_not_there_is_an_error_that_names_it_and_leaves_nothing(beside) -> None:
    before = rig.Held()
    with pytest.raises(FabricError, match=f"cannot be pinned to CPU {missing()}: this process may not run there"):
        TransferEngine("local", incarnation=1, cpus={missing(), *beside})
    assert before.left_over() == rig.NOTHING


@pytest.mark.parametrize("cpu", [-1, 1 << 16, 1 << 40])
def test_a_number_that_no_cpu_has_is_an_error(cpu) -> None:
    with pytest.raises(FabricError, match=f"there is no CPU {cpu}"):
        TransferEngine("local", incarnation=1, cpus=[cpu])
