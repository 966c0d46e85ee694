"""A process of the daemon: its end with its broker, its standstills, its usage."""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call's number
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""
_LONG_SLICE_NS = 100_000_000  # the longest that there is
_GIVING_WAY = 10  # a tenth of the share of others
_OOM_SCORE = 500
LONGEST_SECONDS = 1.0  # a turn of a loop takes milliseconds
_SAMPLE_SECONDS = 0.25  # between looks at the processor time, which are system calls


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


def be_spared_last() -> None:
    """Have the kernel end this process before the data path's where memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))


def give_way() -> None:
    """Have this thread, from now on, give way to every other that wants its processor.

    `nice` alone decides shares: a thread that wakes still waits until the slice of the one that
    runs is over. It preempts one whose slice is longer than its own (Linux 6.12 and later;
    before, and where system calls are filtered, only the shares change). SCHED_IDLE would do the
    same, and starve where all processors are busy, with the interpreter's lock in its hands.
    """
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _GIVING_WAY)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if (number := _SCHED_SETATTR.get(os.uname().machine)) is not None:
        attributes = _SCHED_ATTR.pack(
            _SCHED_ATTR.size, os.SCHED_BATCH, 0, nice, 0, _LONG_SLICE_NS, 0, 0
        )
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # fails on other kernels: no harm


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Collect no garbage meanwhile, and leave out later what there is then: it stays for life.

    A collection that looks at all modules takes ten milliseconds, at a start and in a loop.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Standstill:
    """Times a loop by the moments at which it begins and ends to wait for events.

    Args:
        whose: loop it is, for the log.
        cpu: reads the processor seconds of the loop's thread.
    """

    def __init__(self, whose: str, cpu: Callable[[], float] = time.thread_time) -> None:
        self._whose = whose
        self._cpu = cpu
        self._woke: float | None = None
        self._sampled = 0.0  # when the processor time was `worked`
        self._worked = 0.0
        self._waits = 0.0
        self._until: float | None = 0.0

    def waits(self, now: float, seconds: float | None) -> None:
        """The turn has ended, and events are waited for; None: for as long as it takes."""
        self._waits = now
        self._until = None if seconds is None else now + seconds

    def woke(self, now: float) -> str:
        """The next turn begins: how long the loop stood still since the last began, in words.

        Empty for less than a second. What it says of work may be too much by a quarter second.

        Args:
            now: seconds of a monotonic clock.
        """
        if (woke := self._woke) is None:
            woke = self._waits
        self._woke = now
        late = now - self._until if self._until is not None else 0.0
        still = self._waits - woke + (late if late > 0 else 0.0)
        if still <= LONGEST_SECONDS:
            if now >= self._sampled + _SAMPLE_SECONDS:
                self._sampled, self._worked = now, self._cpu()
            return ""
        before, self._sampled, self._worked = self._worked, now, self._cpu()
        worked = min(still, self._worked - before)
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


_KEPT_SECONDS = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What the operating system says of this process.

    time: unix seconds. host: the machine's name. max_fds: the limit of open descriptors, 0 where
    there is none.
    """

    time: float = 0.0
    host: str = ""
    cpu_seconds: float = 0.0
    rss_bytes: int = 0
    open_fds: int = 0
    max_fds: int = 0


class UsageReader:
    """Asks the system at most once a second: to count descriptors takes a while where many are."""

    def __init__(self) -> None:
        self._until = 0.0
        self._known = ProcessUsage(host=os.uname().nodename)

    def read(self) -> ProcessUsage:
        """Return the time of now, and figures of now or of a second ago."""
        now = time.monotonic()
        if now >= self._until:
            self._until = now + _KEPT_SECONDS
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(OSError):
                # Where no descriptor is left to ask with, the figures stay.
                _, resident, *_ = Path("/proc/self/statm").read_bytes().split()
                self._known = replace(
                    self._known,
                    cpu_seconds=time.process_time(),
                    rss_bytes=int(resident) * _PAGE_BYTES,
                    open_fds=sum(1 for _ in Path("/proc/self/fd").iterdir())
                    - 1,  # less the asking one
                    max_fds=0 if most == resource.RLIM_INFINITY else most,
                )
        return replace(self._known, time=time.time())
