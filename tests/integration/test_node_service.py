"""A service's life as a process, and its operational HTTP."""

import asyncio
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest
from kvferry_node.errors import BindError
from kvferry_node.metrics import NodeMetrics, process_metrics
from kvferry_node.ops import ops_app, serve_http
from kvferry_node.service import process_state, running, wait_until

PRELUDE = """
import asyncio, sys
from kvferry_node.service import run, running
"""


def start(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    script = tmp_path / "service.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    return subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_asks_to_stop_and_main_ends_in_its_own_time(tmp_path, number):
    process = start(
        tmp_path,
        """
        async def main(stop):
            print("ready", flush=True)
            await stop.requested.wait()
            await asyncio.sleep(0.05)
            print("drained", stop.reason, flush=True)
        run(main)
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, output = finish(process)
    assert code == 0
    assert f"drained {number.name}" in output


def test_second_signal_ends_at_once(tmp_path):
    process = start(
        tmp_path,
        """
        async def main(stop):
            print("ready", flush=True)
            await stop.requested.wait()
            print("stuck", flush=True)
            await asyncio.Event().wait()
        run(main)
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    while "stuck" not in process.stdout.readline():
        pass
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("explained", ["BindError", "OSError"])
def test_a_failure_that_explains_itself_is_told_without_where_it_came_from(tmp_path, explained):
    process = start(
        tmp_path,
        f"""
        from kvferry_node.errors import BindError
        async def main(stop):
            raise {explained}("the port is taken")
        run(main, (OSError,))
        """,
    )
    code, output = finish(process)
    assert code == 1
    assert "the port is taken" in output
    assert "Traceback" not in output


FAILURES = {
    "main": """
        async def main(stop):
            raise RuntimeError("kaput")
        """,
    "a loop beside main": """
        async def loop():
            raise RuntimeError("kaput")
        async def main(stop):
            async with running(loop()):
                await stop.requested.wait()
        """,
    "a task that nobody waits for": """
        async def lost():
            raise RuntimeError("kaput")
        async def main(stop):
            asyncio.get_running_loop().create_task(lost())
            await stop.requested.wait()
        """,
    "a callback": """
        def callback():
            raise RuntimeError("kaput")
        async def main(stop):
            asyncio.get_running_loop().call_soon(callback)
            await stop.requested.wait()
        """,
}


@pytest.mark.parametrize("where", FAILURES)
def test_no_failure_goes_unseen(tmp_path, where):
    code, output = finish(start(tmp_path, textwrap.dedent(FAILURES[where]) + "run(main)\n"))
    assert code == 1, output
    assert "kaput" in output


def test_queued_messages_leave_before_the_process_ends(tmp_path):
    import zmq

    pull = zmq.Context.instance().socket(zmq.PULL)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    process = start(
        tmp_path,
        f"""
        import zmq
        async def main(stop):
            push = zmq.Context.instance().socket(zmq.PUSH)
            push.connect("tcp://127.0.0.1:{port}")
            for _ in range(100):
                push.send(b"x" * 10000)
        run(main)
        """,
    )
    try:
        for _ in range(100):
            assert pull.poll(10_000)
            pull.recv()
    finally:
        pull.close(linger=0)
        assert finish(process)[0] == 0


async def test_running_cancels_its_loops_and_waits_for_the_tasks_of_the_body():
    ended: list[str] = []

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("loop")

    async def task() -> None:
        await asyncio.sleep(0.01)
        ended.append("task")

    async with running(loop(), loop()) as group:
        group.create_task(task())
        await asyncio.sleep(0)
    assert ended == ["loop", "loop", "task"]


async def test_wait_until_says_whether():
    asyncio.get_running_loop().call_later(0.01, (seen := []).append, 1)
    assert await wait_until(lambda: bool(seen), 5)
    assert not await wait_until(lambda: False, 0.02, every=0.005)


def test_process_state_counts_this_process():
    state = process_state()
    assert state["threads"] >= 1
    with Path("/dev/null").open():
        assert process_state()["fds"] == state["fds"] + 1
    assert state["rss"] > 1 << 20


async def test_ops_endpoints(nothing_left):
    why: list[str | None] = ["no model yet"]
    metrics = NodeMetrics()
    process_metrics(metrics.registry)
    metrics.wire_refused.labels("json").inc()
    app = ops_app(lambda: {"held_pages": 0, **process_state()}, lambda: why[0], metrics.registry)
    server, port = await serve_http(app, "127.0.0.1", 0)
    assert server.port == port
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).json() == {"status": "alive"}
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no model yet")
        why[0] = None
        assert (await client.get("/ready")).status_code == 200
        text = (await client.get("/metrics")).text
        assert 'kvferry_wire_refused_total{reason="json"} 1.0' in text
        assert "process_resident_memory_bytes" in text
        assert (await client.get("/state")).json()["held_pages"] == 0
    with pytest.raises(BindError, match=rf"{port}.*--http-port"):
        await serve_http(app, "127.0.0.1", port)
    await server.stop()
    await server.wait()
