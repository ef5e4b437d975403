"""Puts this checkout's packages on an environment's path: `link_packages.py [SITE_PACKAGES]`, by default our own.

An editable installation of packages from several folders goes by an import hook, which Python asks after its path. A
folder named kvferry where one happens to work (the one that this checkout was cloned into, say) is on that path, and an
empty namespace package to Python, which then never asks the hook. A package that is itself on the path wins.
"""

import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("purelib"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = settings["tool"]["setuptools"]["packages"]["find"]["where"]
    (site / "kvferry-checkout.pth").write_text("".join(f"{ROOT / folder}\n" for folder in folders))


if __name__ == "__main__":
    main()
