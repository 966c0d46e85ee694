"""A child process ends with its broker."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def tie_to_parent() -> None:
    """Die with the broker, however that ends; ignore signals to end.

    Signals that reach the whole process group or cgroup are for the broker,
    which lets its children finish first.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
