"""The whole of `kvferry up` around children that are small scripts: demonstration, failure, exit status."""

import errno
import fcntl
import io
import os
import sys

import click.testing
import pytest
from kvferry.cli import INTERRUPTED, root
from kvferry.cli.up.log_folder import owned
from kvferry.cli.up.plan import ClusterOptions, http_probe
from kvferry.cli.up.ports import pick
from kvferry.cli.up.run import RunOptions, run
from kvferry.cli.up.spec import ChildSpec, Stage
from rich.console import Console

ROUTER = """
import http.server, json, sys
words, status = sys.argv[2], int(sys.argv[3])

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        event = {"choices": [{"delta": {"content": words}}]}
        self.answer(status, b"data: " + json.dumps(event).encode() + b"\\n\\ndata: [DONE]\\n\\n")

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def up(tmp_path, new_children):
    (port,) = pick("127.0.0.1", 1)
    out = io.StringIO()

    async def start(code, *args, **options):
        def planner(cluster, _folder, client):
            argv = [sys.executable, "-c", code, str(port), *args]
            probe = http_probe(f"{cluster.base_url}/ready", client)
            return [ChildSpec(name="router", stage=Stage.ROUTER, argv=argv, probe=probe, grace=60)]

        cluster = ClusterOptions(model=tmp_path, port=port)
        settings = RunOptions(cluster=cluster, log_dir=tmp_path / "logs", prompt="?", ready_seconds=200, **options)
        return await run(settings, Console(file=out, width=120), planner)

    yield start, out
    assert not new_children()


async def test_a_oneshot_ends_with_status_0_after_the_answer(up):
    start, out = up
    assert await start(ROUTER, "All is well.", "200", oneshot=True) == 0
    assert "All is well." in out.getvalue()


async def test_a_oneshot_whose_answer_fails_ends_with_status_1(up):
    start, out = up
    assert await start(ROUTER, "busy", "503", oneshot=True) == 1
    assert "The request failed" in out.getvalue()
    assert "503" in out.getvalue()


async def test_a_cluster_that_does_not_come_up_shows_the_last_words_and_ends_with_status_1(up):
    start, out = up
    assert await start("import sys; sys.exit('no such model [at all]')", oneshot=True) == 1
    assert "router ended with status 1 while starting" in out.getvalue()
    assert "no such model [at all]" in out.getvalue()


async def test_the_logs_of_another_cluster_that_runs_are_left_alone(up, tmp_path):
    """Two that start within a second on one port both find it free."""
    start, _ = up
    with owned(tmp_path / "logs"):
        (tmp_path / "logs" / "router.log").write_text("theirs")
        with pytest.raises(click.ClickException, match=r"another kvferry up writes its logs to .*logs: .*--port"):
            await start(ROUTER, "All is well.", "200", oneshot=True)
        assert (tmp_path / "logs" / "router.log").read_text() == "theirs"
    assert await start(ROUTER, "All is well.", "200", oneshot=True) == 0


def test_logs_may_lie_where_there_are_no_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with owned(tmp_path / "logs"):
        assert (tmp_path / "logs").is_dir()


async def test_a_signal_while_starting_ends_it(up):
    start, _ = up
    code = "import os, signal, sys, time; os.kill(int(sys.argv[2]), signal.SIGINT); time.sleep(600)"
    assert await start(code, str(os.getpid())) == INTERRUPTED


def test_a_signal_while_a_command_is_imported_ends_it_without_a_word(monkeypatch):
    def interrupted(_module):
        raise KeyboardInterrupt

    monkeypatch.setattr(root.importlib, "import_module", interrupted)
    result = click.testing.CliRunner().invoke(root.root, ["up"])
    assert (result.exit_code, result.output) == (INTERRUPTED, "")
