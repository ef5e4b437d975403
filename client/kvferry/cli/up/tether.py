"""Runs a command that ends when its parent does, even if the parent is killed with SIGKILL.

Started as a script, without site packages, so that it costs milliseconds: `tether.py PARENT_PID COMMAND...`. The
kernel keeps the wish (PR_SET_PDEATHSIG) across exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGKILL at the parent's death, and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The parent may have died before the wish was known.
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    try:
        os.execvp(command[0], command)  # noqa: S606  # becoming the command is the point
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
