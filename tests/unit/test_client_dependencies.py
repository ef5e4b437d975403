"""The client library is light: what it needs, and what it must do without."""

import subprocess
import sys

PROBE = """
import sys

ALLOWED = {"kvferry", "kvferry_proto", "zmq", "orjson", "msgspec"}

class Guard:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names:
            raise ImportError(f"the client library imports {name}")
        return None

sys.meta_path.insert(0, Guard())
import kvferry, kvferry.testing
with kvferry.testing.ScriptedRouter() as router, kvferry.Client(router.endpoint) as client:
    assert client.generate("a b").text == "ab"
"""

NO_CLICK = """
import sys
sys.modules["click"] = None
from kvferry.cli import main
main()
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)


def test_the_library_imports_pyzmq_orjson_and_msgspec_alone():
    result = run(PROBE)
    assert result.returncode == 0, result.stderr


def test_the_command_without_its_extra_says_how_to_get_it():
    result = run(NO_CLICK)
    assert result.returncode == 1
    assert result.stderr.strip() == 'The kvferry command needs more packages: pip install "kvferry[cli]"'
    assert not result.stdout
