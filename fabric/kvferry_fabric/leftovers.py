"""What a killed process leaves of its endpoints over shm."""

import os
from pathlib import Path

SHARED = Path("/dev/shm")  # noqa: S108 - where libfabric puts them


def remove_leftovers() -> None:
    """Remove endpoints over shm that bear this process's pid and aren't its own.

    Over shm an endpoint is a file that is named by its process. That of a killed one stays, and bars the endpoint of
    whoever gets its pid next (EBUSY): the very next process, in a container where a service always has the same pid.
    """
    mapped = Path("/proc/self/maps").read_text()
    for path in SHARED.glob(f"{os.getpid()}:*"):
        if str(path) not in mapped:
            path.unlink(missing_ok=True)
