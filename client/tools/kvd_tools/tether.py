"""Run a module that gets SIGTERM when its parent dies, even by SIGKILL.

`python -m kvd_tools.tether PARENT_PID MODULE ARGUMENT...` asks the kernel for the signal, which
survives exec, and then replaces itself with the module.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Entry point."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])  # noqa: S606  # no shell is the point


if __name__ == "__main__":
    main()
