"""`kvferry chat` against a scripted router, and the top of the command tree."""

import click
import click.testing
import pytest
from kvferry.cli import root as root_module
from kvferry.cli.root import root
from kvferry.testing import ScriptedRouter
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.to_client import Failed
from kvferry_proto.to_router import Generate


def script(request, reply):
    last = request.messages[-1].content
    if last == "fail":
        error = RequestError(code=ErrorCode.NO_NODES, message="no decoder", phase=Phase.ROUTE, node="router-1")
        reply.send(Failed(id=request.id, error=error))
    else:
        reply.complete(request.id, ["You said ", f"[{last}]."])


@pytest.fixture
def router():
    with ScriptedRouter(script) as router:
        yield router


def chat(router, *args, text=None):
    arguments = ["chat", "--endpoint", router.endpoint, *args]
    return click.testing.CliRunner().invoke(root, arguments, input=text)


def test_once_says_one_thing_and_ends(router):
    result = chat(router, "--once", "hello", "--max-tokens", "7", "--timeline")
    assert result.exit_code == 0
    assert "You said [hello]." in result.output
    assert "Where the milliseconds went" in result.output
    assert router.expect(Generate).sampling.max_tokens == 7


def test_a_conversation_keeps_its_history_until_reset(router):
    result = chat(router, "--system", "be kind", text="one\n\n/help\ntwo\n/time\n/reset\nthree\n/quit\n")
    assert result.exit_code == 0
    said = [[turn.content for turn in router.expect(Generate).messages] for _ in range(3)]
    assert said == [
        ["be kind", "one"],
        ["be kind", "one", "You said [one].", "two"],
        ["be kind", "three"],
    ]
    assert "/reset forgets" in result.output


def test_a_turn_that_fails_is_told_and_leaves_no_trace(router):
    result = chat(router, text="fail\nagain\n")
    assert result.exit_code == 0
    assert "no decoder (no_nodes, phase route, node router-1)" in result.output
    router.expect(Generate)
    assert [turn.content for turn in router.expect(Generate).messages] == ["again"]


def test_once_ends_with_status_1_if_the_answer_fails(router):
    result = chat(router, "--once", "fail")
    assert result.exit_code == 1
    assert "Error: no decoder" in result.output


def test_no_router_is_said_within_the_connect_timeout():
    arguments = ["chat", "--endpoint", "tcp://127.0.0.1:1", "--connect-timeout", "0.2", "--once", "x"]
    result = click.testing.CliRunner().invoke(root, arguments)
    assert result.exit_code == 1
    assert "no router answered within 0.2 s" in result.output


class FakeEntry:
    def __init__(self, name, loaded):
        self.name = name
        self.loaded = loaded

    def load(self):
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.fixture
def services(monkeypatch):
    entries = [
        FakeEntry("decoder", ImportError("No module named 'torch'")),
        FakeEntry("router", click.Command("router", callback=lambda: click.echo("routing"))),
        FakeEntry("extra", "not a command"),
    ]
    monkeypatch.setattr(root_module, "entry_points", lambda group: entries)


def test_services_are_listed_without_being_loaded_and_run_when_called(services):
    runner = click.testing.CliRunner()
    listed = runner.invoke(root, ["--help"]).output
    assert "Run a decoder" in listed
    assert listed.index("  router") < listed.index("  decoder") < listed.index("  extra")
    assert runner.invoke(root, ["router"]).output == "routing\n"


def test_a_service_that_cannot_be_loaded_says_what_to_install(services):
    result = click.testing.CliRunner().invoke(root, ["decoder"])
    assert result.exit_code == 1
    assert "No module named 'torch'" in result.output
    assert "kvferry[worker]" in result.output
    assert click.testing.CliRunner().invoke(root, ["extra"]).exit_code == 1
    assert click.testing.CliRunner().invoke(root, ["nonsense"]).exit_code == 2


@pytest.mark.parametrize("name", ["up", "chat", "doctor", "model"])
def test_every_command_has_help(name):
    result = click.testing.CliRunner().invoke(root, [name, "--help"])
    assert result.exit_code == 0
    assert "--help" in result.output
