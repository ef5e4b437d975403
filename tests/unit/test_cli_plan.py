"""What `kvferry up` starts: command lines, ports, folders."""

import importlib
import importlib.util
import socket
import sys
from dataclasses import replace
from pathlib import Path

import click
import click.testing
import httpx
import pytest
from kvferry.cli.up import command as up
from kvferry.cli.up.check import checked
from kvferry.cli.up.plan import ClusterOptions, command_line, http_probe, http_url, service_specs
from kvferry.cli.up.ports import is_free, pick
from kvferry.cli.up.redis import ping, redis_spec, socket_url
from kvferry.cli.up.run import plan
from kvferry.cli.up.spec import Stage
from kvferry.cli.up.supervisor import Supervisor
from kvferry.cli.up.workspace import sweep, workspace
from kvferry_decoder.node import DecoderNode
from kvferry_decoder.settings import DecoderSettings
from kvferry_proto.nodes import NodeRecord, NodeRef, Role

OPTIONS = ClusterOptions(
    model=Path("/m"),
    prefillers=2,
    decoders=3,
    prefill_tp=4,
    decode_tp=2,
    dtype="float32",
    page_size=16,
    chunk_size=256,
    kv_memory="64MiB",
    local_prefill_tokens=8,
    verify_kv=True,
    threads=1,
    namespace="mine",
    served_model_name="small",
    faults={"prefiller": "delay-write-ms=5"},
    device="cpu",
    drain_seconds=30.0,
    extra={"decoder": ["--max-running", "4"]},
)


@pytest.fixture
def nowhere(monkeypatch):
    for name in ("REDIS_URL", "KVFERRY_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("role", ["router", "prefiller", "decoder"])
def test_every_flag_is_one_that_the_service_knows(role):
    if importlib.util.find_spec(f"kvferry_{role}.cli") is None:
        pytest.skip(f"kvferry_{role} has no command yet")
    command = importlib.import_module(f"kvferry_{role}.cli").command
    flags = command.make_context(role, command_line(OPTIONS, role, f"{role}-1", 9000)).params
    assert (flags["node_id"], flags["http_port"], flags["model"]) == (f"{role}-1", "9000", "/m")
    assert flags["namespace"] == "mine"
    if role == "router":
        assert flags["zmq_port"] == "5555"
    else:
        assert (flags["dtype"], flags["page_size"], flags["kv_memory"]) == ("float32", "16", "64MiB")
        assert flags["device"] == "cpu"
        assert flags["tp"] == {"prefiller": "4", "decoder": "2"}[role]
    assert flags["fault"] == ("delay-write-ms=5" if role == "prefiller" else None)


def test_decoders_are_told_to_speculate():
    options = replace(OPTIONS, speculate="ngram", draft_tokens=5)
    line = command_line(options, "decoder", "decoder-1", 9000)
    assert line[line.index("--speculate") :][:4] == ["--speculate", "ngram", "--draft-tokens", "5"]
    assert "--speculate" not in command_line(options, "prefiller", "prefiller-1", 9001)


def test_mixed_decoders_prefill_in_chunks_and_have_no_prefillers():
    options = replace(OPTIONS, prefillers=0, mixed=True)
    specs = service_specs(options, "redis://h/0", [1, 2, 3], httpx.AsyncClient(verify=False))
    assert [spec.name for spec in specs] == ["router", "decoder-1", "decoder-2", "decoder-3"]
    line = specs[1].argv
    assert "--mixed" in line
    assert line[line.index("--prefill-budget") + 1] == "256"


def test_only_mixed_decoders_prefill_much_in_a_step():
    assert DecoderSettings(model="/m").prefill_tokens == 32
    assert DecoderSettings(model="/m", mixed=True).prefill_tokens == 128
    assert DecoderSettings(model="/m", mixed=True, prefill_budget=64).prefill_tokens == 64


def test_one_port_for_both_apis_is_refused():
    result = click.testing.CliRunner().invoke(up.command, ["--port", "8411", "--zmq-port", "8411"])
    assert result.exit_code == 2
    assert "--port and --zmq-port are both 8411" in result.output


@pytest.mark.parametrize("password", ["secret", "sec/re:t@x"])
def test_a_redis_that_cannot_be_reached_is_said_before_anything_starts(nowhere, monkeypatch, password):
    (port,) = pick("127.0.0.1", 1)
    monkeypatch.setenv("REDIS_URL", f"redis://me:{password}@127.0.0.1:{port}/0")
    monkeypatch.setattr(up, "run", lambda *_: pytest.fail("something was started"))
    result = click.testing.CliRunner().invoke(up.command, [])
    assert result.exit_code == 2
    (sentence,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert f"redis://me:***@127.0.0.1:{port}/0" in sentence
    assert password not in result.output


@pytest.mark.parametrize(("user", "why"), [("", "Authentication required"), ("me:secret@", "invalid username-pass")])
def test_a_redis_that_lets_nobody_in_is_said_before_anything_starts(nowhere, monkeypatch, redis_server, user, why):
    redis_server.command("CONFIG", "SET", "requirepass", "sesame")
    monkeypatch.setenv("REDIS_URL", redis_server.url.replace("//", f"//{user}", 1))
    monkeypatch.setattr(up, "run", lambda *_: pytest.fail("something was started"))
    result = click.testing.CliRunner().invoke(up.command, [])
    assert result.exit_code == 2
    assert f"lets nobody in: {why}" in result.output
    assert "secret" not in result.output


@pytest.mark.parametrize(
    ("name", "value"), [("PORT", "x"), ("PORT", "70000"), ("ZMQ_PORT", "0"), ("MODEL", "/nowhere")]
)
def test_a_value_from_the_environment_is_refused_with_its_variables_name(monkeypatch, name, value):
    monkeypatch.setenv(f"KVFERRY_UP_{name}", value)
    result = click.testing.CliRunner().invoke(up.command, [])
    assert result.exit_code == 2
    assert f" (from the environment variable KVFERRY_UP_{name})" in result.output
    assert ". (from" not in result.output
    flag = f"--{name.lower().replace('_', '-')}"
    assert "environment" not in click.testing.CliRunner().invoke(up.command, [flag, value]).output


@pytest.mark.parametrize("provider", ["shm", "local"])
def test_what_shm_can_do_to_others_is_said_where_it_is_asked_for(tiny_model, monkeypatch, nowhere, provider):
    async def nothing(*_):
        return 0

    monkeypatch.setattr(up, "checked", lambda cluster: cluster)
    monkeypatch.setattr(up, "run", nothing)
    result = click.testing.CliRunner().invoke(up.command, ["--model", str(tiny_model), "--provider", provider])
    assert result.exit_code == 0
    assert ("--provider local does" in result.output) == (provider == "shm")


def test_mixed_with_prefillers_is_refused():
    result = click.testing.CliRunner().invoke(up.command, ["--mixed", "--prefillers", "1"])
    assert result.exit_code == 2
    assert "--mixed has no prefillers" in result.output


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--kv-memory", "1KiB"], "--kv-memory 1024 holds 0 pages"),
        (["--kv-memory", "lots"], "--kv-memory: 'lots' is not allowed; expected a size such as 1GiB"),
        (["--provider", "pigeon"], "--provider: 'pigeon' is not allowed; expected one of auto, efa"),
        (["--provider", "efa"], "--provider efa: this machine has none at 127.0.0.1; it has tcp"),
        (["--dtype", "int3"], "--dtype: 'int3' is not allowed; expected one of float32, bfloat16"),
        (["--device", "gpu"], "--device: 'gpu' is not allowed; expected cpu, cuda, cuda:N or auto"),
        (["--prefill-tp", "3"], "--prefill-tp 3: 2 KV heads cannot be split over 3 ranks"),
        (["--decode-tp", "3"], "--decode-tp 3: 2 KV heads cannot be split over 3 ranks"),
        (["--speculate", "mtp"], "has no drafting layer"),
        (["--speculate", "luck"], "--speculate: 'luck' is not allowed; expected one of off, ngram, mtp"),
        (
            ["--chunk-size", "-1"],
            "--chunk-size: '-1' is not allowed; expected a whole number, at least 1, at most 1048576",
        ),
        (["--drain-seconds", "-1"], "--drain-seconds: -1.0 is not allowed"),
        (["--decoder-arg=--cuda-graphs"], "--cuda-graphs replays steps on a GPU, and --device cpu takes none"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence_before_anything_starts(tiny_model, monkeypatch, asked, words):
    monkeypatch.setattr(up, "run", lambda *_: pytest.fail("something was started"))
    result = click.testing.CliRunner().invoke(up.command, ["--model", str(tiny_model), *asked])
    assert result.exit_code == 2
    (sentence,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert words in sentence
    assert "Traceback" not in result.output


def test_what_is_not_asked_for_is_the_services_own(tiny_model):
    options = checked(ClusterOptions(model=tiny_model))
    assert options.drain_seconds == DecoderSettings(model="/m").drain_seconds
    line = command_line(options, "decoder", "decoder-1", 9000)
    assert line[line.index("--drain-seconds") + 1] == str(options.drain_seconds)
    assert not {"--dtype", "--provider", "--device", "--kv-memory", "--log-level"} & set(line)


def test_a_mixed_decoder_says_that_it_prefills_whatever_fits():
    def published(**own):
        node = object.__new__(DecoderNode)
        node._own = DecoderSettings(model="/m", **own)
        ref = NodeRef("d", 1)
        return node.describe(NodeRecord(ref=ref, role=Role.DECODER, endpoint="tcp://h:1", max_context=4096))

    assert published(mixed=True).local_prefill_tokens == 4096
    assert published(local_prefill_tokens=7).local_prefill_tokens == 7


def test_there_is_a_child_per_service_and_the_redis_url_is_no_argument():
    specs = service_specs(OPTIONS, "redis://:secret@h/0", [1, 2, 3, 4, 5], httpx.AsyncClient(verify=False))
    assert [spec.name for spec in specs] == [
        "router", "prefiller-1", "prefiller-2", "decoder-1", "decoder-2", "decoder-3"
    ]  # fmt: skip
    assert [spec.stage for spec in specs[:4]] == [Stage.ROUTER, Stage.PREFILLER, Stage.PREFILLER, Stage.DECODER]
    assert all(spec.argv[:3] == [sys.executable, "-m", f"kvferry_{spec.stage.name.lower()}"] for spec in specs)
    assert all("secret" not in " ".join(spec.argv) for spec in specs)
    assert all(spec.env["KVFERRY_REDIS_URL"] == "redis://:secret@h/0" for spec in specs)
    assert all(spec.grace > OPTIONS.drain_seconds for spec in specs)


def test_a_data_parallel_rank_is_a_node_of_its_own():
    options = ClusterOptions(model=Path("/m"), prefillers=1, decoders=2, prefill_dp=2, decode_dp=2, decode_tp=2)
    assert options.workers == [
        ("prefiller-1-dp0", "prefiller"), ("prefiller-1-dp1", "prefiller"),
        ("decoder-1-dp0", "decoder"), ("decoder-1-dp1", "decoder"),
        ("decoder-2-dp0", "decoder"), ("decoder-2-dp1", "decoder"),
    ]  # fmt: skip
    specs = service_specs(options, "redis://h/0", list(range(1, 7)), httpx.AsyncClient(verify=False))
    assert [spec.name for spec in specs] == ["router", *(name for name, _ in options.workers)]
    assert ["--tp" in spec.argv for spec in specs] == [False, False, False, True, True, True, True]


async def test_a_redis_of_our_own_comes_first_unless_one_is_named(tmp_path, nowhere, monkeypatch):
    port, zmq_port = pick("127.0.0.1", 2)
    options = ClusterOptions(model=tmp_path, port=port, zmq_port=zmq_port)
    async with httpx.AsyncClient(verify=False) as client:
        specs = plan(options, tmp_path, client)
        assert specs[0].name == "redis"
        assert specs[1].env["KVFERRY_REDIS_URL"] == f"unix://{tmp_path}/redis.sock"
        monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379/0")
        specs = plan(options, tmp_path, client)
    assert [spec.name for spec in specs] == ["router", "prefiller-1", "decoder-1", "decoder-2"]
    assert specs[0].env["KVFERRY_REDIS_URL"] == "redis://elsewhere:6379/0"


@pytest.mark.parametrize(("level", "words"), [("", "another with --port$"), ("1", 'another with ARGS="--port ..."$')])
async def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path, nowhere, monkeypatch, level, words):
    monkeypatch.setenv("MAKELEVEL", level)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ClusterOptions(model=tmp_path, port=port)
        async with httpx.AsyncClient(verify=False) as client:
            with pytest.raises(click.ClickException, match=f"port {port} on 127.0.0.1 is in use: choose {words}"):
                plan(options, tmp_path, client)
        assert not is_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", "192.0.2.1 is no address of this machine"),
        ("a..b", "a..b can't be resolved"),
        ("nosuch.invalid", "nosuch.invalid can't be resolved"),
    ],
)
async def test_a_host_that_cannot_be_served_at_is_said_as_such(tmp_path, nowhere, monkeypatch, host, words):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    async with httpx.AsyncClient(verify=False) as client:
        with pytest.raises(click.ClickException, match=f"{words}.* choose another with --host"):
            plan(ClusterOptions(model=tmp_path, host=host), tmp_path, client)


def test_picked_ports_are_free_and_different():
    ports = pick("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert all(is_free("127.0.0.1", port) for port in ports)


async def test_the_private_redis_runs_and_leaves_nothing(tmp_path):
    with workspace(tmp_path) as folder:
        supervisor = Supervisor([redis_spec(folder)], tmp_path, lambda *_: None)
        try:
            await supervisor.start(20)
            assert await ping(folder / "redis.sock") is None
            assert socket_url(folder) == f"unix://{folder}/redis.sock"
            assert (folder / "redis.sock").stat().st_mode & 0o077 == 0
        finally:
            await supervisor.stop()
        assert "no answer" in await ping(folder / "redis.sock")
    assert not list(tmp_path.glob("kvferry-up-*"))


def test_a_folder_whose_name_is_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(ValueError, match="TMPDIR"):
        redis_spec(tmp_path / ("x" * 120))


def test_folders_of_the_living_stay_and_of_the_dead_go(tmp_path):
    dead = tmp_path / "kvferry-up-dead"
    dead.mkdir()
    (dead / "lock").touch()
    with workspace(tmp_path) as folder:
        sweep(tmp_path)
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (httpx.Response(200, json={"status": "ready"}), None),
        (httpx.Response(503, json={"status": "not ready", "reason": "no decoder has joined"}), "no decoder has joined"),
        (httpx.Response(502, text="<html>"), "http://x/ready answers 502"),
    ],
)
async def test_readiness_is_asked_over_http(answer, why):
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _request: answer)) as client:
        assert await http_probe("http://x/ready", client)() == why


async def test_nobody_there_is_a_reason_too():
    async with httpx.AsyncClient(verify=False) as client:
        assert "http://127.0.0.1:1/ready" in await http_probe("http://127.0.0.1:1/ready", client)()


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("::1", "http://[::1]:80")],
)  # fmt: skip
def test_urls_are_reachable_from_here(host, url):
    assert http_url(host, 80) == url
