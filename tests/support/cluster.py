"""A whole cluster for tests: real processes, real Redis, real fabric, on ports of its own."""

import atexit
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import brake
import httpx
import redis
from forge import Forge, Forged

# One client for all: each loads the machine's certificates otherwise, which takes longer than most requests.
_http = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
LOAD = ("running", "waiting", "queued_tokens")
START_SECONDS = 180
STOP_SECONDS = 90


# Below the range from which connections are given their own ports: one of those took the port between probe and bind.
PORTS = range(15000, 32000)
BLOCK = 200


def own_ports():
    """Ports that no other test process is given, over and over: it holds the first of a block as long as it lives."""
    for first in random.SystemRandom().sample(PORTS[::BLOCK], len(PORTS[::BLOCK])):
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
            continue
        atexit.register(holder.close)
        return itertools.cycle(range(first + 1, first + BLOCK))
    raise AssertionError(f"no block of {BLOCK} ports is free in {PORTS}")


_ports = own_ports()


def free_port() -> int:
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", next(_ports)))
            return probe.getsockname()[1]


def wait_for(condition, seconds, what):
    """Poll `condition` until it returns something true; return that."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what() if callable(what) else what}"
        time.sleep(0.05)
    return found


@dataclass
class Node:
    """One service process."""

    name: str
    role: str
    flags: list[str]
    log: Path
    environ: dict[str, str]
    http_port: int = field(default_factory=free_port)
    process: Forged | None = None

    def start(self):
        flags = ["--node-id", self.name, "--http-port", str(self.http_port), *self.flags]
        self.process = Forge.shared().start(self.role, flags, self.log, self.environ, self.brake)

    @property
    def brake(self):
        return self.log.with_suffix(".brake")

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http_port}"

    def ready(self):
        assert self.process.poll() is None, f"{self.name} has ended:\n{self.tail()}"
        try:
            return _http.get(f"{self.url}/ready", timeout=20).status_code == 200
        except httpx.TransportError:
            return False

    def state(self):
        return _http.get(f"{self.url}/state", timeout=60).raise_for_status().json()

    def metrics(self):
        return _http.get(f"{self.url}/metrics", timeout=60).raise_for_status().text

    def held(self):
        """What the node holds and should not when idle."""
        return {name: count for name, count in self.state()["held"].items() if count}

    def resources(self):
        """Threads, file descriptors and resident bytes of the process."""
        return self.state()["process"]

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def restart(self):
        self.start()
        wait_for(self.ready, START_SECONDS, f"{self.name} ready")

    def stop(self):
        """SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest_fail = f"{self.name} did not end on SIGTERM:\n{self.tail()}"
            raise AssertionError(pytest_fail) from None

    def tail(self, lines=40):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def events(self, name):
        """Log lines with this event."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if entry.get("event") == name:
                    found.append(entry)
        return found


class Cluster:
    """A router, prefillers, decoders. Use as a context manager: leaving it stops everything, and checks that it can."""

    def __init__(
        self,
        folder,
        model,
        *,
        prefillers=1,
        decoders=1,
        common=(),
        worker=(),
        prefiller=(),
        decoder=(),
        router=(),
    ):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket = self.folder / "redis.sock"
        self.redis_process = None
        self.zmq_port = free_port()
        self.model = str(model)
        environ = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "REDIS_URL": self.redis_url}
        # Longer than a busy machine lets anybody stand still; tests that wait for the end of a lease say so.
        shared = ["--model", self.model, "--lease-seconds", "15", "--drain-seconds", "60", *common]
        flags = {
            "router": [*shared, "--zmq-port", str(self.zmq_port), "--accept-seconds", "60", *router],
            "prefiller": [*shared, "--threads", "1", "--verify-kv", "--idle-check-seconds", "1", *worker, *prefiller],
            "decoder": [*shared, "--threads", "1", "--verify-kv", "--idle-check-seconds", "1", *worker, *decoder],
        }
        names = [("router", "router")]
        names += [(f"prefiller{i}", "prefiller") for i in range(prefillers)]
        names += [(f"decoder{i}", "decoder") for i in range(decoders)]
        self.nodes = {name: Node(name, role, flags[role], self.folder / f"{name}.log", environ) for name, role in names}

    @property
    def redis_url(self):
        return f"unix://{self.socket}"

    def __getitem__(self, name) -> Node:
        return self.nodes[name]

    @property
    def url(self):
        return self["router"].url

    @property
    def workers(self):
        return [node for node in self.nodes.values() if node.role != "router"]

    def start_redis(self):
        # A test run that is killed takes its Redis with it.
        command = ["setpriv", "--pdeathsig", "KILL", "redis-server", "--port", "0", "--unixsocket", str(self.socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        self.redis_process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def stop_redis(self):
        self.redis_process.kill()
        self.redis_process.wait()
        self.socket.unlink(missing_ok=True)

    def __enter__(self):
        try:
            self.start_redis()
            for node in self.nodes.values():
                node.start()
            # The router last: it waits for the others, and would not say that one has ended.
            for node in [*self.workers, self["router"]]:
                wait_for(node.ready, START_SECONDS, lambda node=node: f"{node.name} ready:\n{node.tail()}")
            self.wait_seen()
        except BaseException:
            self._kill_all()
            raise
        return self

    @property
    def alive(self):
        return [node for node in self.nodes.values() if node.process.poll() is None]

    def wait_seen(self):
        """Wait until everybody who lives is in Redis, with a load to be placed by, and the router sees just them."""
        alive = {node.name: node.role for node in self.alive}
        counts = {f"{role}s": list(alive.values()).count(role) for role in ("prefiller", "decoder")} | {"redis": True}

        def seen():
            told = self.told()
            if set(told) != set(alive) or not all("running" in told[name] for name in alive if alive[name] != "router"):
                return False
            state = self["router"].state()
            return all(state[name] == count for name, count in counts.items())

        wait_for(seen, START_SECONDS, lambda: (alive, self.told(), self["router"].state()))

    def told(self):
        """What Redis says of each node; of none when it can't be asked."""
        try:
            with redis.Redis.from_url(self.redis_url, decode_responses=True) as client:
                keys = client.keys("kvferry:node:*")
                return {key.rpartition(":")[2]: client.hgetall(key) for key in keys}
        except redis.RedisError:
            return {}

    def settle(self, seconds=60):
        """Wait until no node holds anything, and placement knows: what is asked next is spread evenly."""

        def settled():
            told = self.told()
            nodes = [node for node in self.alive if node.name in told]
            loads = [int(told[node.name].get(what, 1)) for node in nodes if node.role != "router" for what in LOAD]
            return not any(loads) and not self.reserved() and not any(node.held() for node in nodes)

        wait_for(settled, seconds, lambda: (self.told(), self.reserved()))

    def reserved(self):
        """Placement's reservations on the nodes that live."""
        with redis.Redis.from_url(self.redis_url, decode_responses=True) as client:
            lives = [f"{name}:{told['incarnation']}" for name, told in self.told().items()]
            return {life: found for life in lives if (found := client.hkeys(f"kvferry:held:{life}"))}

    @contextlib.contextmanager
    def slow_motion(self, *names, step=0.5, free=0):
        """While the block runs, each forward pass of these workers (all, without names) takes `step` seconds more.

        The first `free` ones take no longer. Pass an infinite `step` to hold them for as long as the block runs.
        """
        nodes = [self[name] for name in names] or self.workers
        with brake.braked([node.brake for node in nodes], step, free):
            yield

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                statuses = {name: node.stop() for name, node in self.nodes.items()}
                assert set(statuses.values()) == {0}, statuses
                leaks = {node.name: node.events("idle, and still holding") for node in self.workers}
                assert not any(leaks.values()), leaks
        finally:
            self._kill_all()

    def _kill_all(self):
        for node in self.nodes.values():
            if node.process is not None and node.process.poll() is None:
                node.kill()
        if self.redis_process is not None:
            self.stop_redis()

    # --- requests ----------------------------------------------------------------------------------------------

    def complete(self, prompt, *, timeout=120, expect=200, **fields):
        """POST /v1/completions; the body, status checked."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, "kvferry_timeline": True} | fields
        reply = _http.post(f"{self.url}/v1/completions", json=body, timeout=timeout)
        assert reply.status_code == expect, f"{reply.status_code}: {reply.text}\n{self.tails()}"
        return reply.json()

    def tokens(self, prompt, **fields):
        """Token ids of the answer."""
        return self.complete(prompt, **fields)["choices"][0]["token_ids"]

    def tails(self):
        return "\n".join(f"== {name}\n{node.tail(15)}" for name, node in self.nodes.items())

    def wait_idle(self, seconds=60):
        """Wait until no node holds anything."""

        def idle():
            return not any(node.held() for node in self.nodes.values())

        wait_for(idle, seconds, lambda: {name: node.held() for name, node in self.nodes.items()})
