"""Fixtures that all tests share: a real Redis of one's own, and a check that nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis
from hypothesis import HealthCheck, settings

# The same examples each time, and as slow as a busy machine makes them: a run that fails is one that fails again. To
# search elsewhere: HYPOTHESIS_PROFILE=default.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


class RedisServer:
    """A redis-server on a unix socket, without persistence: stopping it loses everything, as a flush does."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        # A test run that is killed takes its Redis with it.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self._process = subprocess.Popen([*command, "--dir", str(self.socket.parent)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None, "redis-server has ended"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop; safe to call twice."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None
        self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """Hang: connections stay open, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str) -> object:
        """Run one command."""
        with redis.Redis.from_url(self.url, decode_responses=True) as client:
            return client.execute_command(*words)

    def _answers(self) -> bool:
        try:
            return self.command("PING") == "PONG" or self.command("PING") is True
        except redis.RedisError:
            return False


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


def held() -> tuple[int, int]:
    """File descriptors and native threads of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), sum(1 for _ in Path("/proc/self/task").iterdir())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail the test if it leaves Python threads, native threads or file descriptors behind.

    What ZeroMQ and libuv open once for the whole process stays; it is there before the count begins.
    """
    import uvloop
    import zmq

    uvloop.new_event_loop().close()
    zmq.Context.instance().socket(zmq.DEALER).close(linger=0)
    threads = set(threading.enumerate())
    before = held()
    yield
    deadline = time.monotonic() + 60
    # Closed sockets are reaped by ZeroMQ's own thread, a moment later.
    while any(now > then for now, then in zip(held(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(threading.enumerate()) <= threads
    assert all(now <= then for now, then in zip(held(), before, strict=True)), f"{held()} now, {before} before"


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """Processes below this one, but for those that were there before the test: the forge of the clusters may be."""

    def below() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True))

    before = below()
    return lambda: list(below() - before)


async def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition` is true; fail after `seconds`, a bound for a slow machine and no measurement."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., object]:
    return eventually


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Async tests run on the loop that services run on."""
    import uvloop

    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder, prepared once."""
    from kvferry_engine.default_model import prepare_default_model

    return prepare_default_model()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """A small random Llama with the default model's tokenizer."""
    from tiny_model import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), default_model)
