"""Check of the ports that a router binds to: free, held by a router of ours, or by somebody else."""

from typing import Any

import httpx

from kvferry.cli.doctor.finding import Finding, fail, ok
from kvferry.cli.up.plan import http_url
from kvferry.cli.up.ports import Refusal, is_free, refusal

ASK_SECONDS = 2.0


def ports(host: str, http_port: int, zmq_port: int) -> list[Finding]:
    """Ports of the HTTP and the ZeroMQ API; one that a running router of ours holds is as it should be."""
    router = {} if is_free(host, http_port) else _router(http_url(host, http_port))
    served = {http_port} | ({zmq_port} if str(router.get("endpoint", "")).endswith(f":{zmq_port}") else set())
    return [_finding(host, port, router if port in served else {}) for port in (http_port, zmq_port)]


def _finding(host: str, port: int, router: dict[str, Any]) -> Finding:
    if router:
        return ok(f"port {port}", f"held by a running router named {router['node']}, which serves {router['model']}")
    refused = refusal(host, port)
    return ok(f"port {port}", f"free on {host}") if refused is None else _fail(port, refused)


def _fail(port: int, refused: Refusal) -> Finding:
    of_port = "end who holds it (ss -ltnp tells), or choose another port"
    return fail(f"port {port}", refused.text, "choose another --host" if refused.of_host else of_port)


def _router(url: str) -> dict[str, Any]:
    """What the router at `url` says of itself; empty if no router of ours answers there."""
    try:
        state = httpx.get(f"{url}/state", timeout=ASK_SECONDS, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return {}
    ours = isinstance(state, dict) and state.get("role") == "router" and {"node", "model"} <= state.keys()
    return state if ours else {}
