"""Settings: where a value comes from, and what a refusal says."""

import re
from typing import Annotated, Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kvferry_node.errors import SettingsError
from kvferry_node.options import load_settings, settings_command
from kvferry_node.settings import Bytes, NodeSettings, Port, fields, help_text, node_ref, parse_bytes


class WorkerSettings(NodeSettings, kw_only=True, frozen=True):
    model: Annotated[str, help_text("Model folder.")]
    kv_memory: Annotated[Bytes, help_text("Memory of the KV cache.")] = 1 << 30
    verify_kv: Annotated[bool, help_text("Compare checksums.")] = False
    providers: Annotated[list[str], help_text("Providers, the best first.")] = msgspec.field(default_factory=list)
    other_port: Annotated[Port, help_text("Another port.")] = 0


def load(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, config: str | None = None
) -> WorkerSettings:
    return load_settings(WorkerSettings, "decoder", {"model": "/m"} | (flags or {}), environ or {}, config)


def test_flags_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("zmq-port = 1\nhttp_port = 1\nother_port = 1\n[decoder]\nother_port = 2\n[router]\nx = 1\n")
    got = load({"zmq_port": "3"}, {"KVFERRY_ZMQ_PORT": "2", "KVFERRY_HTTP_PORT": "2"}, str(file))
    assert (got.zmq_port, got.http_port, got.other_port, got.host) == (3, 2, 2, "127.0.0.1")


def test_values_are_read_from_text():
    got = load({"kv_memory": "512MiB", "lease_seconds": ".9", "heartbeat_seconds": "0.1", "providers": ("tcp", "shm")})
    assert (got.kv_memory, got.lease_seconds, got.providers) == (512 << 20, 0.9, ["tcp", "shm"])
    got = load({}, {"KVFERRY_PROVIDERS": "tcp,shm", "KVFERRY_VERIFY_KV": "true", "REDIS_URL": "unix:///r"})
    assert (got.providers, got.verify_kv, got.redis_url) == (["tcp", "shm"], True, "unix:///r")
    got = load({}, {"KVFERRY_REDIS_URL": "redis://a", "REDIS_URL": "unix:///r"})
    assert got.redis_url == "redis://a"
    assert load({"lease_seconds": "4", "heartbeat_seconds": "0.5"}).standstill_seconds == 3.5
    assert load({"fault": "corrupt-write=3,delay-write-ms=0.5"}).faults == {"corrupt-write": 3, "delay-write-ms": 0.5}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"zmq_port": "70000"}, ["--zmq-port", "'70000'", "at most 65535"]),
        ({"zmq_port": "x"}, ["--zmq-port", "'x'", "whole number"]),
        ({"log_level": "loud"}, ["--log-level", "debug, info, warning, error"]),
        ({"redis_url": "http://x"}, ["--redis-url", "redis://HOST:PORT/DB"]),
        ({"lease_seconds": "0"}, ["--lease-seconds", "more than 0"]),
        ({"lease_seconds": "nan"}, ["--lease-seconds"]),
        ({"lease_seconds": "0.6"}, ["--lease-seconds", "twice --heartbeat-seconds", "0.6"]),
        ({"kv_memory": "lots"}, ["--kv-memory", "'lots'", "1GiB"]),
        ({"node_id": "a b"}, ["--node-id", "'a b'"]),
        ({"fault": "boom"}, ["--fault", "NAME=NUMBER"]),
    ],
)
def test_refusals_name_the_flag_and_what_is_allowed(flags, words):
    with pytest.raises(SettingsError) as caught:
        load(flags)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:sec/r@t@host:1/0", "'http://me:***@host:1/0'"),
        ("file:///redis.sock?password=secret&db=1", "'file:///redis.sock?password=***&db=1'"),
    ],
)
def test_refusals_keep_passwords_to_themselves(url, shown):
    with pytest.raises(SettingsError) as caught:
        load({"redis_url": url})
    assert shown in str(caught.value)


def test_refusals_name_the_source(tmp_path):
    with pytest.raises(SettingsError, match="KVFERRY_ZMQ_PORT"):
        load({}, {"KVFERRY_ZMQ_PORT": "-1"})
    file = tmp_path / "c.toml"
    file.write_text("zmq_port = -1")
    with pytest.raises(SettingsError, match=re.escape(str(file))):
        load({}, {}, str(file))
    file.write_text("zmq_prot = 1")
    with pytest.raises(SettingsError, match="did you mean zmq_port"):
        load({}, {}, str(file))
    file.write_text("= 1")
    with pytest.raises(SettingsError, match=re.escape(str(file))):
        load({}, {}, str(file))
    with pytest.raises(SettingsError, match="No such file"):
        load({}, {}, str(tmp_path / "none.toml"))


def test_setting_without_default_must_be_given():
    with pytest.raises(SettingsError, match="--model must be given"):
        load_settings(WorkerSettings, "decoder", {}, {})


def test_command_has_a_flag_for_every_field_and_refuses_with_status_2():
    got: list[WorkerSettings] = []

    @settings_command(WorkerSettings, "decoder")
    def decoder(settings: WorkerSettings) -> None:
        """Decode."""
        got.append(settings)

    assert isinstance(decoder, click.Command)
    runner = CliRunner()
    text = runner.invoke(decoder, ["--help"]).output
    for field in fields(WorkerSettings):
        assert field.flag in text
        assert field.help
    words = ["--model", "/m", "--verify-kv", "--providers", "a", "--providers", "b"]
    assert runner.invoke(decoder, words).exit_code == 0
    assert (got[0].verify_kv, got[0].providers) == (True, ["a", "b"])
    env = {"KVFERRY_MODEL": "/e", "KVFERRY_VERIFY_KV": "true"}
    assert runner.invoke(decoder, ["--no-verify-kv"], env=env).exit_code == 0
    assert (got[1].model, got[1].verify_kv) == ("/e", False)
    refused = runner.invoke(decoder, ["--model", "/m", "--zmq-port", "x"])
    assert refused.exit_code == 2
    assert "--zmq-port" in refused.output


def test_node_ids_are_drawn_or_given():
    assert node_ref(NodeSettings(node_id="d1"), "decoder").id == "d1"
    first, second = (node_ref(NodeSettings(), "decoder") for _ in range(2))
    assert first.id.startswith("decoder-")
    assert first.id != second.id
    assert first.incarnation != second.incarnation
    msgspec.convert(first.id, fields(NodeSettings)[0].type)


@given(st.integers(0, 1 << 40), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "k", "M", "gb", " TiB "]))
def test_sizes(number, unit):
    power = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4}[unit.strip().lower()[:1]]
    assert parse_bytes(f"{number}{unit}") == number * 1024**power


@given(st.text(max_size=8))
def test_other_sizes_are_refused_with_an_example(text):
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*[kmgt]?(i?b)?\s*", text, re.IGNORECASE):
        return
    with pytest.raises(ValueError, match="1GiB"):
        parse_bytes(text)
