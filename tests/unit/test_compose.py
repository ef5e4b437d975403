"""compose.yaml and the Dockerfiles: in form, and in step with what the services accept."""

import importlib
import importlib.util
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from kvferry_node.options import load_settings

ROOT = Path(__file__).parents[2]
ROLES = ("router", "prefiller", "decoder")
SETTINGS = {"router": "RouterSettings", "prefiller": "PrefillerSettings", "decoder": "DecoderSettings"}

WORDS = {"type": "array", "items": {"type": "string"}}
HEALTHCHECK = {
    "type": "object",
    "required": ["test", "interval", "timeout", "retries"],
    "properties": {"test": WORDS, "retries": {"type": "integer"}},
    "additionalProperties": {"type": "string", "pattern": r"^\d+(s|m)$"},
}
SERVICE = {
    "type": "object",
    "required": ["command", "restart", "networks", "healthcheck", "stop_grace_period"],
    "additionalProperties": False,
    "properties": {
        "image": {"type": "string"},
        "build": {
            "type": "object",
            "required": ["context", "dockerfile"],
            "additionalProperties": False,
            "properties": {"context": {"const": "."}, "dockerfile": {"type": "string"}},
        },
        "command": WORDS,
        "hostname": {"type": "string"},
        "restart": {"enum": ["unless-stopped"]},
        "init": {"type": "boolean"},
        "networks": WORDS,
        "ports": WORDS,
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "volumes": {"type": "array", "items": {"type": "object", "required": ["type", "source", "target"]}},
        "healthcheck": HEALTHCHECK,
        "stop_grace_period": {"type": "string", "pattern": r"^\d+s$"},
        "depends_on": {"type": "object"},
        "shm_size": {"type": "string", "pattern": r"^\d+gb$"},
        "ulimits": {"type": "object", "properties": {"memlock": {"const": -1}}},
        "cap_drop": WORDS,
        "security_opt": WORDS,
        "deploy": {
            "type": "object",
            "properties": {
                "resources": {
                    "type": "object",
                    "properties": {
                        "reservations": {
                            "type": "object",
                            "properties": {
                                "devices": {
                                    "type": "array",
                                    "items": {"type": "object", "required": ["driver", "device_ids", "capabilities"]},
                                }
                            },
                        }
                    },
                }
            },
        },
    },
    "oneOf": [{"required": ["image"]}, {"required": ["build"]}],
}
COMPOSE = {
    "type": "object",
    "required": ["name", "services", "networks"],
    "patternProperties": {"^x-": {}},
    "additionalProperties": False,
    "properties": {
        "name": {"const": "kvferry"},
        "services": {"type": "object", "additionalProperties": SERVICE},
        "networks": {"type": "object"},
    },
}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def services(compose):
    return compose["services"]


def role_of(name):
    return name.partition("-")[0]


def ours(services):
    return {name: service for name, service in services.items() if role_of(name) in ROLES}


def settings_of(role, argv, environ):
    """What the service would run with, as its own command line reads it."""
    if importlib.util.find_spec(f"kvferry_{role}.cli") is None:
        pytest.skip(f"kvferry_{role} has no command yet")
    command = importlib.import_module(f"kvferry_{role}.cli").command
    struct = getattr(importlib.import_module(f"kvferry_{role}.settings"), SETTINGS[role])
    flags = dict(command.make_context(role, list(argv)).params)
    config = ROOT / "services" / role / Path(flags.pop("config")).name
    return load_settings(struct, role, flags, environ, str(config))


def test_the_file_has_the_form_of_a_compose_file(compose):
    jsonschema.validate(compose, COMPOSE)


def test_there_are_a_redis_a_router_a_prefiller_and_three_decoders(services):
    assert sorted(map(role_of, services)) == ["decoder"] * 3 + ["prefiller", "redis", "router"]


def test_nothing_is_published_but_the_api_and_that_privately(services):
    assert [name for name, service in services.items() if "ports" in service] == ["router"]
    assert services["router"]["ports"] == ["${KVFERRY_PUBLISH:-127.0.0.1:8000}:8000"]
    assert all(service["networks"] == ["cluster"] for service in services.values())


def test_every_worker_has_a_gpu_of_its_own_pinned_memory_and_room_in_shm(services):
    workers = [service for name, service in services.items() if role_of(name) in {"prefiller", "decoder"}]
    devices = [worker["deploy"]["resources"]["reservations"]["devices"][0] for worker in workers]
    assert sorted(device["device_ids"] for device in devices) == [["0"], ["1"], ["2"], ["3"]]
    assert all(device["capabilities"] == ["gpu"] for device in devices)
    assert all(worker["ulimits"] == {"memlock": -1} and worker["shm_size"] == "1gb" for worker in workers)


@pytest.mark.parametrize("role", ROLES)
def test_each_service_is_built_and_run_for_its_role(services, role):
    for name, service in ours(services).items():
        if role_of(name) != role:
            continue
        assert service["build"]["dockerfile"] == f"services/{role}/Dockerfile"
        assert service["command"][:4] == ["kvferry", role, "--config", f"/etc/kvferry/{role}.toml"]
        assert "/ready" in service["healthcheck"]["test"][-1]
        assert service["depends_on"]["redis"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("role", ROLES)
def test_command_lines_variables_and_files_are_what_the_services_accept(services, role):
    for name, service in ours(services).items():
        if role_of(name) != role:
            continue
        environ = {key: substituted(value) for key, value in service["environment"].items()}
        settings = settings_of(role, service["command"][2:], environ)
        # What one container publishes is what the others resolve.
        assert settings.host == service["hostname"]
        assert settings.redis_url == "redis://redis:6379/0"
        assert settings.http_port == 8000, "the healthcheck asks port 8000"
        assert settings.drain_seconds < int(service["stop_grace_period"].removesuffix("s"))
        assert settings.model == "/model"


def substituted(value):
    """Compose's ${NAME:-default}, with nothing set."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", value)


@pytest.mark.parametrize("role", ROLES)
def test_dockerfiles_copy_what_exists_and_run_as_nobody(role):
    text = (ROOT / "services" / role / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (services/\S+)", text, re.MULTILINE):
        assert (ROOT / source).is_file(), source
    instructions = [line.split()[0] for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert instructions[-1] == "CMD"
    assert "USER kvferry" in text
    assert f'CMD ["kvferry", "{role}", "--config", "/etc/kvferry/{role}.toml"]' in text
    assert ("gcc" in text) == (role != "router")
