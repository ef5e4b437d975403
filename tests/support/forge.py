"""A process that has imported the services, and forks them: a node is up in the time that its model takes to load.

`Forge` is the tests' end. The other end, this file as a script, reads a JSON line per order and answers with one.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import brake

ROLES = ("router", "prefiller", "decoder")
_PR_SET_PDEATHSIG = 1


class Forge:
    """Starts service processes; use as a context manager, or share the one that lives as long as the tests."""

    _shared = None

    @classmethod
    def shared(cls):
        if cls._shared is None:
            cls._shared = cls()
            atexit.register(cls._shared.close)
        return cls._shared

    def __init__(self):
        command = [sys.executable, str(Path(__file__).resolve()), str(os.getpid())]
        environ = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self._lock = threading.Lock()

    def start(self, role, flags, log, environ, brake=None):
        """`brake`: see brake.py; the path of the file that the process is to heed."""
        order = {"role": role, "flags": list(flags), "log": str(log), "environ": dict(environ)}
        return Forged(self, self._order(**order, brake=brake and str(brake)))

    def status(self, pid):
        return self._order(status=pid)

    def _order(self, **order):
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


class Forged:
    """A process that the forge has started, used as a subprocess.Popen."""

    def __init__(self, forge, pid):
        self.pid = pid
        self.returncode = None
        self._forge = forge

    def poll(self):
        if self.returncode is None:
            self.returncode = self._forge.status(self.pid)
        return self.returncode

    def wait(self, timeout=60):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _tether(parent):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _read_tokenizer(flags):
    """Once for all decoders of a model: they find it read."""
    from kvferry_engine.config import ModelConfig
    from kvferry_engine.errors import ModelError
    from kvferry_engine.grammar import read_ahead

    with contextlib.suppress(OSError, ValueError, ModelError):
        folder = Path(flags[flags.index("--model") + 1])
        read_ahead(folder, ModelConfig.from_folder(folder).vocab_size)


def _become(order, commands, orders):
    """Be the service, from here to the end of the process.

    That end is the exit handlers alone: to tear the interpreter down would copy every page that is shared with the
    forge, which takes longer than the node has lived.
    """
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, standard in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, standard)
    os.close(null)
    os.close(log)
    orders.close()
    os.environ.update(order["environ"])
    status = 1
    if order["brake"]:
        brake.install(order["brake"])
    try:
        commands[order["role"]].main(order["flags"], prog_name=order["role"])
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def main():
    import importlib

    _tether(int(sys.argv[1]))
    commands = {role: importlib.import_module(f"kvferry_{role}.cli").command for role in ROLES}
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    orders = os.fdopen(os.dup(0))
    os.close(0)
    os.close(1)
    os.open(os.devnull, os.O_RDONLY)
    os.open(os.devnull, os.O_WRONLY)
    for line in iter(orders.readline, ""):
        order = json.loads(line)
        if "status" in order:
            pid, status = os.waitpid(order["status"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            if order["role"] == "decoder":
                _read_tokenizer(order["flags"])
            forge = os.getpid()
            answer = os.fork()
            if answer == 0:
                _tether(forge)
                answers.close()
                _become(order, commands, orders)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
