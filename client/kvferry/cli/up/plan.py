"""The children of a cluster: their command lines, in one place."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvferry.cli.up.spec import ChildSpec, Probe, Stage

PROBE_TIMEOUT = 2.0
GRACE_EXTRA = 5.0
"""Seconds beyond the drain that a service has to leave in."""
ROLES = ("router", "prefiller", "decoder")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What `kvferry up` was asked for. None leaves a choice to the service's own default."""

    model: Path
    prefillers: int = 1
    decoders: int = 2
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_dp: int = 1
    decode_dp: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    zmq_port: int = 5555
    provider: str | None = None
    device: str | None = None
    dtype: str | None = None
    page_size: str | None = None
    chunk_size: str | None = None
    kv_memory: str | None = None
    local_prefill_tokens: str | None = None
    mixed: bool = False
    """Decoders prefill by themselves, and there are no prefillers."""
    speculate: str | None = None
    draft_tokens: str | None = None
    verify_kv: bool = False
    log_level: str | None = None
    drain_seconds: float | None = None
    namespace: str | None = None
    served_model_name: str | None = None
    threads: str | None = None
    faults: dict[str, str] = field(default_factory=dict)
    """Role -> faults to inject."""
    extra: dict[str, list[str]] = field(default_factory=dict)
    """Role -> further arguments, as they are."""

    @property
    def workers(self) -> list[tuple[str, str]]:
        """Name and role of every prefiller and decoder: data-parallel ranks are nodes of their own."""
        kinds = ("prefiller", self.prefillers, self.prefill_dp), ("decoder", self.decoders, self.decode_dp)
        return [
            (f"{role}-{number}" if ranks == 1 else f"{role}-{number}-dp{rank}", role)
            for role, count, ranks in kinds
            for number in range(1, count + 1)
            for rank in range(ranks)
        ]

    def tp(self, role: str) -> int:
        """Tensor-parallel ranks of a node of this role."""
        return {"prefiller": self.prefill_tp, "decoder": self.decode_tp}.get(role, 1)

    @property
    def base_url(self) -> str:
        """Where the router's HTTP front is."""
        return http_url(self.host, self.port)


COMMON = ("model", "served_model_name", "host", "log_level", "drain_seconds", "namespace")
WORKER = ("provider", "device", "dtype", "page_size", "kv_memory", "threads")
OWN: dict[str, tuple[str, ...]] = {
    "router": ("zmq_port",),
    "prefiller": (*WORKER, "chunk_size"),
    "decoder": (*WORKER, "local_prefill_tokens", "mixed", "speculate", "draft_tokens", "verify_kv"),
}
"""Options that each role takes; the flags have the same names."""


def service_specs(
    options: ClusterOptions, redis_url: str, ports: list[int], client: httpx.AsyncClient
) -> list[ChildSpec]:
    """Return one child per service; `ports` has an HTTP port for each of `options.workers`."""
    places = [("router", "router", options.port)]
    places += [(name, role, port) for (name, role), port in zip(options.workers, ports, strict=True)]
    return [
        ChildSpec(
            name=name,
            stage=Stage[role.upper()],
            argv=[sys.executable, "-m", f"kvferry_{role}", *command_line(options, role, name, port)],
            # Not a flag: a URL may hold a password, and command lines are for all to read.
            env={"KVFERRY_REDIS_URL": redis_url, "PYTHONUNBUFFERED": "1"},
            probe=http_probe(f"{http_url(options.host, port)}/ready", client),
            grace=(options.drain_seconds or 0.0) + GRACE_EXTRA,
        )
        for name, role, port in places
    ]


def command_line(options: ClusterOptions, role: str, name: str, http_port: int) -> list[str]:
    """Return the flags of one service."""
    argv = ["--node-id", name, "--http-port", str(http_port)]
    for option in (*COMMON, *OWN[role]):
        value = getattr(options, option)
        flag = f"--{option.replace('_', '-')}"
        if isinstance(value, bool):
            argv += [flag] if value else []
        elif value is not None:
            argv += [flag, str(value)]
    if role == "decoder" and options.mixed and options.chunk_size is not None:
        argv += ["--prefill-budget", str(options.chunk_size)]
    if options.tp(role) > 1:
        argv += ["--tp", str(options.tp(role))]
    if role in options.faults:
        argv += ["--fault", options.faults[role]]
    return argv + options.extra.get(role, [])


def http_url(host: str, port: int) -> str:
    """Return the URL at which a server bound to `host` is reached from this machine."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{reached}:{port}"


def http_probe(url: str, client: httpx.AsyncClient) -> Probe:
    """Ask a service's /ready."""

    async def probe() -> str | None:
        try:
            # No connection may stay open: a server that drains would wait for it.
            answer = await client.get(url, timeout=PROBE_TIMEOUT, headers={"Connection": "close"})
        except httpx.HTTPError as error:
            return f"{url}: {error or type(error).__name__}"
        return None if answer.is_success else _reason(answer)

    return probe


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["reason"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answers {answer.status_code}"
