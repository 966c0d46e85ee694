"""Run a module in place of this process, and end with the process that started it.

`python -m kvd_tools.demo.tether PARENT_PID MODULE ARGUMENT...`: the kernel
sends SIGTERM when the parent is gone, even if it was killed and could not
clean up. The setting survives exec.
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
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])  # noqa: S606  # no shell is the point


if __name__ == "__main__":
    main()
