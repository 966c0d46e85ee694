"""A process of the daemon: it ends with its broker, and notices when it stood still."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
LONGEST_SECONDS = 1.0  # a turn of a loop takes milliseconds


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


class Standstill:
    """Times a loop by the moments at which it begins and ends to wait for events."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._woke: float | None = None
        self._worked = 0.0
        self._waits = 0.0
        self._until: float | None = 0.0

    def waits(self, now: float, seconds: float | None) -> None:
        """The turn has ended, and events are waited for; None: for as long as it takes."""
        self._waits = now
        self._until = None if seconds is None else now + seconds

    def woke(self, now: float, cpu: float) -> str:
        """The next turn begins: how long the loop stood still since the last began, in words.

        Empty for less than a second.

        Args:
            now: seconds of a monotonic clock.
            cpu: processor seconds of this thread.
        """
        turn = self._waits - self._woke if self._woke is not None else 0.0
        late = max(0.0, now - self._until) if self._until is not None else 0.0
        worked = cpu - self._worked if self._woke is not None else 0.0
        self._woke, self._worked = now, cpu
        still = turn + late
        if still <= LONGEST_SECONDS:
            return ""
        line = (
            f"the {self._whose}'s loop stood still for {still:.1f} s, {worked:.1f} s of it at work"
        )
        if worked > still / 2:
            return (
                f"{line}: a turn took that long, and all requests waited; a bug in kvd, report it"
            )
        return (
            f"{line}: the process did not run or waited for the system; see whether the machine"
            " swaps or is overloaded, or whether the process was stopped"
        )

    def __repr__(self) -> str:
        return f"<Standstill of the {self._whose}, last turn at {self._woke}>"
