"""`kvferry doctor`: each check, and how findings are told."""

import socket
import subprocess

import click.testing
import httpx
import orjson
import pytest
from kvferry.cli.doctor import command, fabric, machine, ports, redis
from kvferry.cli.doctor.finding import Finding, Level, fail, ok, warn
from kvferry.cli.doctor.model import model

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def run(monkeypatch, findings, *args):
    monkeypatch.setattr(command, "examine", lambda *_: findings)
    return click.testing.CliRunner().invoke(command.command, args)


def test_status_is_1_if_something_fails_and_0_if_it_only_warns(monkeypatch):
    assert run(monkeypatch, [ok("a", "fine"), warn("b", "so so", "do this")]).exit_code == 0
    result = run(monkeypatch, [ok("a", "fine"), fail("b", "broken", "do that")])
    assert result.exit_code == 1
    assert "FAIL" in result.output
    assert "do that" in result.output


def test_json_has_every_finding(monkeypatch):
    result = run(monkeypatch, [warn("b", "so so", "do this")], "--json")
    assert orjson.loads(result.output) == [{"name": "b", "level": "warn", "text": "so so", "advice": "do this"}]


def test_this_machine_can_be_examined(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        findings = command.examine(tmp_path, "127.0.0.1", port, 0)
    by_name = {finding.name: finding for finding in findings}
    assert by_name["python"].level is Level.OK
    assert by_name[f"port {port}"].level is Level.FAIL
    assert by_name["model"].level is Level.FAIL
    assert all(finding.advice for finding in findings if finding.level is not Level.OK)


@pytest.mark.parametrize(("soft", "level"), [(-1, Level.OK), (8 << 20, Level.WARN), (64 << 30, Level.OK)])
def test_little_pinned_memory_is_a_warning(monkeypatch, soft, level):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (soft, -1))
    assert machine.memlock().level is level


def test_shared_memory_that_is_small_or_absent_is_a_warning(monkeypatch, tmp_path):
    assert machine.shared_memory(tmp_path / "none").level is Level.WARN
    monkeypatch.setattr(machine, "LEAST_SHM", 1 << 60)
    assert machine.shared_memory(tmp_path).level is Level.WARN


def test_redis_is_found_as_a_program_or_behind_its_url(monkeypatch, tmp_path):
    monkeypatch.setattr(redis.shutil, "which", lambda _name: None)
    assert redis.redis(None).level is Level.FAIL
    monkeypatch.setattr(redis.shutil, "which", lambda _name: "/usr/bin/redis-server")
    assert redis.redis(None).level is Level.OK
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://:secret@127.0.0.1:{server.getsockname()[1]}/0"
        assert redis.redis(url).level is Level.OK
        assert "secret" not in redis.redis(url).text
    assert redis.redis(url).level is Level.FAIL
    assert redis.redis(f"unix://{tmp_path}/none.sock").level is Level.FAIL
    assert redis.redis("http://x").level is Level.FAIL


def test_a_redis_that_lets_nobody_in_is_wrong(redis_server):
    assert redis.redis(redis_server.url).level is Level.OK
    redis_server.command("CONFIG", "SET", "requirepass", "sesame")
    finding = redis.redis(redis_server.url.replace("//", "//:secret@", 1))
    assert finding.level is Level.FAIL
    assert "lets nobody in" in finding.text
    assert "secret" not in finding.text


@pytest.mark.parametrize(
    ("files", "level", "words"),
    [
        ({}, Level.FAIL, "config.json, tokenizer.json, model.safetensors"),
        ({"config.json": b"{}", "tokenizer.json": b""}, Level.FAIL, "model.safetensors"),
        ({"config.json": b"{", "tokenizer.json": b"", "model.safetensors": b""}, Level.FAIL, "can't be read"),
        (
            {
                "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
                "tokenizer.json": b"",
                "model.safetensors.index.json": b'{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}',
                "x-1.safetensors": b"",
            },
            Level.FAIL,
            "x-2.safetensors",
        ),
        (
            {
                "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
                "tokenizer.json": b"",
                "model.safetensors": NO_TENSORS,
            },
            Level.WARN,
            "no chat template",
        ),
        (
            {
                "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
                "tokenizer.json": b"",
                "model.safetensors": NO_TENSORS,
                "tokenizer_config.json": b'{"chat_template": "x"}',
            },
            Level.OK,
            "LlamaForCausalLM",
        ),
        (
            {
                "config.json": b'{"architectures": ["GPT2LMHeadModel"]}',
                "tokenizer.json": b"",
                "model.safetensors": b"",
            },
            Level.FAIL,
            "architecture 'GPT2LMHeadModel' is not known; known are DeepseekV3ForCausalLM,",
        ),
    ],
)
def test_a_model_folder_is_whole_or_says_what_it_lacks(tmp_path, files, level, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    finding = model(tmp_path)
    assert finding.level is level
    assert words in finding.text


@pytest.mark.parametrize(
    ("told", "level"),
    [("shm:\n    version: 1\nnet:\nUDP:\n", Level.OK), ("verbs:\ntcp:\n", Level.OK), ("UDP:\n", Level.FAIL)],
)
def test_providers_are_read_from_fi_info(monkeypatch, told, level):
    monkeypatch.setattr(fabric.shutil, "which", lambda _name: "/usr/bin/fi_info")
    result = subprocess.CompletedProcess([], 0, stdout=told, stderr="")
    monkeypatch.setattr(fabric.subprocess, "run", lambda *_args, **_more: result)
    assert fabric.providers().level is level


class FakeEntry:
    name = "fabric"

    def __init__(self, result):
        self.result = result

    def load(self):
        if isinstance(self.result, Exception):
            raise self.result
        return lambda: self.result


def test_installed_packages_offer_checks_of_their_own(monkeypatch):
    monkeypatch.setattr(fabric, "entry_points", lambda group: [FakeEntry([{"name": "x", "level": "ok", "text": "y"}])])
    assert list(fabric.offered()) == [Finding(name="x", level=Level.OK, text="y")]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ImportError("no _fabric"), "make setup"),
        (ModuleNotFoundError("no _fabric", name="kvferry_fabric._fabric"), "make setup"),
        (ModuleNotFoundError("no numpy", name="numpy"), "kvferry[worker]"),
    ],
)
def test_a_check_that_cannot_be_loaded_is_a_finding_that_says_what_is_missing(monkeypatch, error, advice):
    monkeypatch.setattr(fabric, "entry_points", lambda group: [FakeEntry(error)])
    (finding,) = fabric.offered()
    assert finding.level is Level.FAIL
    assert str(error) in finding.text
    assert advice in finding.advice


def router_at(monkeypatch, state):
    monkeypatch.setattr(ports.httpx, "get", lambda *_args, **_more: httpx.Response(200, json=state))


def test_the_ports_of_a_running_router_are_as_they_should_be(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as zmq:
        taken = [server.getsockname()[1] for server in (http, zmq)]
        router_at(monkeypatch, {"role": "router", "node": "r", "model": "m", "endpoint": f"tcp://127.0.0.1:{taken[1]}"})
        assert [finding.level for finding in ports.ports("127.0.0.1", *taken)] == [Level.OK, Level.OK]
        assert "running router named r, which serves m" in ports.ports("127.0.0.1", *taken)[1].text
        router_at(monkeypatch, {"role": "router", "node": "r", "model": "m", "endpoint": "tcp://127.0.0.1:1"})
        assert [finding.level for finding in ports.ports("127.0.0.1", *taken)] == [Level.OK, Level.FAIL]
        router_at(monkeypatch, ["somebody else's"])
        assert [finding.level for finding in ports.ports("127.0.0.1", *taken)] == [Level.FAIL, Level.FAIL]


def test_a_host_that_is_not_this_machines_is_no_port_in_use():
    found = ports.ports("192.0.2.1", 8000, 5555)
    assert {finding.text for finding in found} == {"192.0.2.1 is no address of this machine"}
    assert {finding.advice for finding in found} == {"choose another --host"}


def test_the_default_model_is_there_or_will_be_made(monkeypatch, tmp_path, default_model):
    assert "prepared on first use" not in model(None).text
    assert str(default_model) in model(None).text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "prepared on first use" in model(None).text
