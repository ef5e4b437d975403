"""`kvferry up` as a supervisor, over children that are small scripts."""
# Other processes are watched through files, and only looked at now and then.
# ruff: noqa: ASYNC110, ASYNC240

import asyncio
import itertools
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from kvferry.cli.up import child as child_module
from kvferry.cli.up.backoff import LARGEST_SECONDS, MOST_IN_WINDOW, WINDOW_SECONDS, Backoff
from kvferry.cli.up.child import ChildState
from kvferry.cli.up.spec import ChildSpec, Stage
from kvferry.cli.up.supervisor import StartError, Supervisor

GOOD = """
import os, pathlib, signal, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def leave(*_):
    with (folder / "order").open("a") as order:
        order.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("hello from", name, flush=True)
(folder / f"{name}.ready").write_text(str(os.getpid()))
while True:
    time.sleep(60)
"""
DEAF = GOOD.replace("signal.SIGTERM, leave", "signal.SIGTERM, signal.SIG_IGN")
EARLY = "import sys; print('cannot find my model'); sys.exit(3)"
SLOW = "import time; time.sleep(60)"
PARENT = GOOD.replace(
    "while True",
    "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nwhile True",
)


def spec(folder, name, stage=Stage.DECODER, code=GOOD, grace=60.0):
    async def probe():
        return None if (folder / f"{name}.ready").exists() else "no sign of life yet"

    argv = [sys.executable, "-c", code, name, str(folder)]
    return ChildSpec(name=name, stage=stage, argv=argv, probe=probe, grace=grace)


@pytest.fixture
def said():
    return []


@pytest.fixture
async def make(tmp_path, said, new_children):
    made = []

    def build(*specs):
        supervisor = Supervisor(
            list(specs), tmp_path, lambda child, text: said.append((child.spec.name, text)), first_backoff=0.05
        )
        made.append(supervisor)
        return supervisor

    yield build
    for supervisor in made:
        supervisor.hurry()
        await supervisor.stop()
    assert not new_children()


async def until(condition, seconds=100.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_all_start_and_are_stopped_router_first_redis_last(tmp_path, make, said):
    supervisor = make(
        spec(tmp_path, "redis", Stage.REDIS),
        spec(tmp_path, "prefiller-1", Stage.PREFILLER),
        spec(tmp_path, "decoder-1", Stage.DECODER),
        spec(tmp_path, "router", Stage.ROUTER),
    )
    await supervisor.start(200)
    assert {child.state for child in supervisor.children} == {ChildState.READY}
    assert said[0][0] == "redis"
    assert "hello from router" in (tmp_path / "router.log").read_text()
    await supervisor.stop()
    assert (tmp_path / "order").read_text().split() == ["router", "decoder-1", "prefiller-1", "redis"]
    assert {child.state for child in supervisor.children} == {ChildState.STOPPED}


async def test_a_child_that_dies_early_is_named_with_its_last_words(tmp_path, make):
    supervisor = make(spec(tmp_path, "router", Stage.ROUTER), spec(tmp_path, "decoder-1", code=EARLY))
    with pytest.raises(StartError, match="decoder-1 ended with status 3 while starting") as caught:
        await supervisor.start(200)
    assert caught.value.child.tail() == "cannot find my model"


async def test_a_command_that_does_not_exist_is_an_early_death(tmp_path, make):
    missing = ChildSpec(
        name="x", stage=Stage.ROUTER, argv=["/no/such/program"], probe=spec(tmp_path, "x").probe, grace=1
    )
    supervisor = make(missing)
    with pytest.raises(StartError):
        await supervisor.start(200)
    assert "No such file" in supervisor.children[0].tail()


async def test_a_child_that_is_not_ready_in_time_is_named_with_the_reason(tmp_path, make):
    supervisor = make(spec(tmp_path, "decoder-1", code=SLOW))
    with pytest.raises(StartError, match=r"decoder-1 was not ready within 0\.3 s: no sign of life yet"):
        await supervisor.start(0.3)


async def test_a_child_that_is_killed_later_comes_back_as_another_process(tmp_path, make, said):
    supervisor = make(spec(tmp_path, "router", Stage.ROUTER), spec(tmp_path, "decoder-1"))
    await supervisor.start(200)
    (tmp_path / "decoder-1.ready").unlink()
    (router, decoder) = supervisor.children
    before, other = decoder.pid, router.pid
    os.kill(before, signal.SIGKILL)
    await until(lambda: decoder.state is ChildState.READY and decoder.pid not in {None, before})
    assert router.pid == other
    assert any("was ended by SIGKILL; starting it again in" in text for name, text in said if name == "decoder-1")


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path, make, said):
    supervisor = make(spec(tmp_path, "decoder-1", code=DEAF, grace=0.2))
    await supervisor.start(200)
    await supervisor.stop()
    assert ("decoder-1", "did not end in time and was killed") in said
    assert supervisor.children[0].code == -signal.SIGKILL


async def test_hurry_does_not_wait_for_the_grace(tmp_path, make, said):
    supervisor = make(spec(tmp_path, "decoder-1", code=DEAF, grace=60))
    await supervisor.start(200)
    supervisor.hurry()
    await asyncio.wait_for(supervisor.stop(), 40)
    assert said[-1] == ("decoder-1", "killed, as asked")


async def test_what_a_child_leaves_behind_is_ended_too(tmp_path, make, new_children):
    supervisor = make(spec(tmp_path, "decoder-1", code=PARENT))
    await supervisor.start(200)
    await until(lambda: len(new_children()) == 2)
    grandchildren = psutil.Process(supervisor.children[0].pid).children()
    os.kill(supervisor.children[0].pid, signal.SIGKILL)
    await until(lambda: not any(each.is_running() and each.status() != "zombie" for each in grandchildren))


async def test_stopping_while_a_child_waits_for_its_restart_ends_at_once(tmp_path, make):
    supervisor = make(spec(tmp_path, "decoder-1"))
    supervisor._first_backoff = 60
    await supervisor.start(200)
    os.kill(supervisor.children[0].pid, signal.SIGKILL)
    await until(lambda: supervisor.children[0].state is ChildState.DIED)
    await asyncio.wait_for(supervisor.stop(), 40)
    assert supervisor.children[0].state is ChildState.STOPPED


async def test_a_process_that_cannot_be_made_ends_the_watch(tmp_path, make, monkeypatch):
    supervisor = make(spec(tmp_path, "decoder-1"))
    await supervisor.start(200)
    monkeypatch.setattr(child_module.sys, "executable", "/no/such/python")
    os.kill(supervisor.children[0].pid, signal.SIGKILL)
    with pytest.raises(FileNotFoundError):
        await asyncio.wait_for(supervisor.watch(), 100)


def test_states_change_only_along_the_table(tmp_path):
    child = child_module.Child(spec(tmp_path, "x"), tmp_path / "x.log")
    with pytest.raises(RuntimeError, match="x cannot become ready: it is idle"):
        child.enter(ChildState.READY)
    assert set(child_module.TRANSITIONS) == set(ChildState)


def test_restarts_back_off_and_are_at_most_five_a_minute():
    backoff, now, times = Backoff(), 0.0, []
    for _ in range(12):
        now += backoff.next(now)
        times.append(now)
    assert times[1] - times[0] == 1.0
    for first, last in zip(times, times[MOST_IN_WINDOW:], strict=False):
        assert last - first >= WINDOW_SECONDS
    # A child that has been well for long starts again as if it had never died.
    assert backoff.next(now + 2 * WINDOW_SECONDS) == 0.5
    assert max(b - a for a, b in itertools.pairwise(times[:5])) <= LARGEST_SECONDS


UP = """
import asyncio, sys
from pathlib import Path
from rich.console import Console
from kvferry.cli.up.plan import ClusterOptions
from kvferry.cli.up.run import RunOptions, run
from kvferry.cli.up.spec import ChildSpec, Stage

GOOD = {good!r}
folder = Path(sys.argv[1])

def plan(options, space, client):
    (folder / "space").write_text(str(space))
    def spec(name, stage):
        async def probe():
            return None if (folder / f"{{name}}.ready").exists() else "not yet"
        argv = [sys.executable, "-c", GOOD, name, str(folder)]
        return ChildSpec(name=name, stage=stage, argv=argv, probe=probe, grace=60)
    return [spec("router", Stage.ROUTER), spec("decoder-1", Stage.DECODER)]

options = RunOptions(cluster=ClusterOptions(model=folder), log_dir=folder, prompt="", ready_seconds=200)
sys.exit(asyncio.run(run(options, Console(), plan)))
"""


class TestWholeCommand:
    @pytest.fixture
    async def up(self, tmp_path):
        code = textwrap.dedent(UP.format(good=GOOD))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        yield process
        if process.returncode is None:
            process.kill()
        await process.communicate()

    async def serving(self, up):
        while b"Serving until" not in (line := await asyncio.wait_for(up.stdout.readline(), 200)):
            assert line, "up ended before it served"

    def pids(self, tmp_path):
        return [int((tmp_path / f"{name}.ready").read_text()) for name in ("router", "decoder-1")]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    async def test_a_signal_drains_and_leaves_nothing(self, up, tmp_path, number):
        await self.serving(up)
        space = Path((tmp_path / "space").read_text())
        assert space.is_dir()
        up.send_signal(number)
        assert await asyncio.wait_for(up.wait(), 100) == 0
        assert not any(psutil.pid_exists(pid) for pid in self.pids(tmp_path))
        assert not space.exists()
        assert (tmp_path / "order").read_text().split() == ["router", "decoder-1"]

    async def test_even_a_killed_up_leaves_no_process(self, up, tmp_path):
        await self.serving(up)
        children = [psutil.Process(pid) for pid in self.pids(tmp_path)]
        up.kill()
        await up.wait()
        deadline = time.monotonic() + 100
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        # Nor a folder, once the next one has come along.
        from kvferry.cli.up.workspace import sweep

        space = Path((tmp_path / "space").read_text())
        sweep(space.parent)
        assert not space.exists()
