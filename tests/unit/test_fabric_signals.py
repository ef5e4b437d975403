"""libfabric does not take the application's signals away."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
heard = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: heard.append(number))
from kvferry_fabric import TransferEngine
with TransferEngine(sys.argv[1], incarnation=1):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
assert heard == [signal.SIGTERM, signal.SIGINT], heard
"""


@pytest.mark.parametrize("provider", ["tcp", "net", "shm"])
def test_a_signal_still_reaches_the_handler_of_the_application(provider):
    command = [sys.executable, "-c", SCRIPT, provider]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
