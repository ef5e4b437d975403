"""The checkout's packages are found from every folder, also from one in which a clone of it lies."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# As an interpreter starts in an environment, but for what is installed there.
FIND = """
import importlib.util, site, sys
sys.path.insert(0, "")
site.addsitedir(sys.argv[1])
for name in sys.argv[2:]:
    print(importlib.util.find_spec(name).origin)
"""


def test_a_folder_of_the_same_name_does_not_hide_a_package(tmp_path):
    names = ["kvferry", "kvferry_proto", "kvferry_decoder"]
    site, work = tmp_path / "site", tmp_path / "work"
    for folder in (site, *(work / name for name in names)):
        folder.mkdir(parents=True)
    subprocess.run([sys.executable, ROOT / "scripts/link_packages.py", site], check=True)
    command = [sys.executable, "-I", "-S", "-c", FIND, site, *names]
    found = subprocess.run(command, cwd=work, capture_output=True, text=True, check=True)
    homes = ["client/kvferry", "proto/kvferry_proto", "services/decoder/kvferry_decoder"]
    assert found.stdout.split() == [str(ROOT / home / "__init__.py") for home in homes]
