"""A process of the daemon and the system: descriptors, locks, signals, stalls, usage."""

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvd.errors import ImportFailed, PoolError

SEALED_MEMFD_RECIPE = (
    "memfd_create(MFD_ALLOW_SEALING), ftruncate, then fcntl(F_ADD_SEALS, F_SEAL_SHRINK)"
)
LOCK_SECONDS = 2.0
"""Time for which a lock that another process has is retried."""
LOCK_RETRY_SECONDS = 0.01
_MIN_HIGH_NUMBER = 64  # of a descriptor
_PR_SET_PDEATHSIG = 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call's number
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""
_LONG_SLICE_NS = 100_000_000  # the longest that there is
_NICE_INCREMENT = 10  # a tenth of the share of others
_OOM_SCORE = 500
MAX_STALL_SECONDS = 1.0  # a turn of a loop takes milliseconds
_SAMPLE_SECONDS = 0.25  # between looks at the processor time, which are system calls


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit: each session needs several."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def open_files_remedy() -> str:
    """Return the remedy if no descriptor is left, with this process's limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"raise LimitNOFILE (ulimit -n), now {limit}"


def is_out_of_files(error: BaseException | None) -> bool:
    """Return whether an error is EMFILE or ENFILE: no more files can be opened."""
    return isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}


def free_descriptors() -> int:
    """Return how many more files this process may open; 0 if that cannot be counted."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Linux 6.2 and later give the number as size; a list takes a microsecond for each.
        count = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # noqa: PTH116, PTH208  # no paths are needed
    except OSError:  # a list needs a descriptor
        return 0
    return limit - count


def sealed_size(fd: int, description: str) -> int:
    """Return the size of a memory file that a worker shares and that cannot shrink.

    Touching pages of a file that has shrunk is a SIGBUS. Other kinds of files are not examined at
    all: their file system may answer late or never.

    Raises:
        ImportFailed: another kind of file, or not sealed against shrinking; names the recipe.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # calls no file system
    except OSError:
        raise ImportFailed(
            f"{description} is no memory file; make it with {SEALED_MEMFD_RECIPE}"
        ) from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ImportFailed(
            f"{description} could be shortened while it is mapped; make it with"
            f" {SEALED_MEMFD_RECIPE}"
        )
    return os.fstat(fd).st_size


def try_lock(descriptor: int, seconds: float = 0.0) -> bool:
    """Lock a file or directory exclusively; return False if another process keeps a lock on it.

    Args:
        descriptor: of the file; closing it unlocks.
        seconds: for which to retry.

    Raises:
        OSError: the file system cannot lock it.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_RETRY_SECONDS)
        else:
            return True


def is_named(descriptor: int, path: Path) -> bool:
    """Return whether `path` names the open file, which was not removed, moved or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def lock_directory(descriptor: int) -> None:
    """Lock a directory exclusively; retry for `LOCK_SECONDS`.

    A process killed while it starts a child leaves its lock to the child, which closes it when it
    executes its program. Hence the retry.

    Args:
        descriptor: of the directory; closing it unlocks.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file system cannot lock directories.
    """
    if not try_lock(descriptor, LOCK_SECONDS):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def lock_pool(pool_fd: int) -> None:
    """Lock the pool's file, shared, until this process can no longer write to it.

    The next daemon waits for this lock, and the pool counts as in use (`kvd.machine.pools`). It is
    on a separate descriptor, never closed and opened before any device or medium, so that it has
    the lowest number: the kernel closes a dying process's descriptors from the highest number down.

    Raises:
        PoolError: another daemon is taking the pool over; this process's daemon has exited.
    """
    descriptor = os.open(f"/proc/self/fd/{pool_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PoolError("another daemon is taking the pool over") from error


def to_high_number(descriptor: int) -> int:
    """Duplicate a descriptor to a high number and close the original, freeing a low number.

    Raises:
        PoolError: no high number is available.
    """
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _MIN_HIGH_NUMBER)
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise PoolError(
            f"no file descriptor from {_MIN_HIGH_NUMBER} on is available, the limit is {limit};"
            " raise LimitNOFILE, or ulimit -n"
        ) from error
    os.close(descriptor)
    return moved


def map_pool(pool_fd: int, pool_bytes: int) -> memoryview:
    """Map the pool's file, writable; the caller still owns the descriptor.

    Raises:
        PoolError: the file is smaller than `pool_bytes`, or cannot be mapped.
    """
    file_bytes = os.fstat(pool_fd).st_size
    if file_bytes < pool_bytes:
        raise PoolError(f"the pool's file has {file_bytes} bytes instead of {pool_bytes}")
    try:
        return memoryview(mmap.mmap(pool_fd, pool_bytes))
    except (OSError, ValueError) as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        remedy = (
            "" if limit == resource.RLIM_INFINITY else f"raise LimitAS (ulimit -v), now {limit}"
        )
        raise PoolError(
            f"the pool's {pool_bytes} bytes cannot be mapped: {error}", remedy
        ) from error


def die_with_parent() -> None:
    """Have the kernel kill this process when the broker exits; ignore SIGHUP, SIGINT, SIGTERM.

    Signals to the whole process group or cgroup are meant for the broker, which stops its children
    after they have finished.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it exited before prctl
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def prefer_oom_kill() -> None:
    """Have the OOM killer prefer this process to those of the data path."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))


def lower_priority() -> None:
    """Lower the calling thread's priority, so that waking threads preempt it.

    `nice` only changes shares of the processor: a waking thread still waits for the end of the
    running thread's slice, unless that slice is longer than its own (Linux 6.12 and later). So this
    thread gets the longest slice. On older kernels, and if system calls are filtered, only the
    share changes. SCHED_IDLE could starve this thread while it holds the interpreter lock.
    """
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE_INCREMENT)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if (number := _SCHED_SETATTR.get(os.uname().machine)) is not None:
        attributes = _SCHED_ATTR.pack(
            _SCHED_ATTR.size, os.SCHED_BATCH, 0, nice, 0, _LONG_SLICE_NS, 0, 0
        )
        # A failure on other kernels is harmless.
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection in the block, then exempt all existing objects from collections.

    A collection that visits all modules takes ten milliseconds, at the start and in a loop.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stopped_text(pid: int) -> str:
    """Return `pid 12 is stopped (state T)` if a signal or a debugger has stopped it, else empty."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it has exited
        return ""
    state = status.rpartition(b") ")[2][:1].decode()  # the name before it may have any bytes
    return f"pid {pid} is stopped (state {state})" if state in {"T", "t"} else ""


class LoopUsage(NamedTuple):
    """What a loop's thread and its process have used so far.

    thread_seconds, process_seconds: of processor time. disk_faults: page faults that read a disk or
        swap (major faults), of all threads.
    """

    thread_seconds: float
    process_seconds: float
    disk_faults: int

    @classmethod
    def read(cls) -> "LoopUsage":
        """Return the usage of this thread and process."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return cls(time.thread_time(), time.process_time(), faults)


class StallDetector:
    """Detects turns of an event loop that take longer than `MAX_STALL_SECONDS`.

    Args:
        name: of the process, for the log.
        usage: returns the usage of the loop's thread and its process.
    """

    def __init__(self, name: str, usage: Callable[[], LoopUsage] = LoopUsage.read) -> None:
        self._name = name
        self._usage = usage
        self._woke_at: float | None = None
        self._sampled_at = 0.0  # when the usage was `_sample`
        self._sample = LoopUsage(0.0, 0.0, 0)
        self._wait_began = 0.0
        self._wait_until: float | None = 0.0

    def waits(self, now: float, seconds: float | None) -> None:
        """Record that the loop starts to wait for at most `seconds`; None: without limit."""
        self._wait_began = now
        self._wait_until = None if seconds is None else now + seconds

    def woke(self, now: float) -> str:
        """Record the end of the wait; return a warning if the last turn stalled, else empty.

        It says what was measured, and what that proves. The measured times may be up to a quarter
        second too high.

        Args:
            now: seconds of a monotonic clock.
        """
        if (began := self._woke_at) is None:
            began = self._wait_began
        self._woke_at = now
        overslept = now - self._wait_until if self._wait_until is not None else 0.0
        stall = self._wait_began - began + (overslept if overslept > 0 else 0.0)
        if stall <= MAX_STALL_SECONDS:
            if now >= self._sampled_at + _SAMPLE_SECONDS:
                self._sampled_at, self._sample = now, self._usage()
            return ""
        before, self._sampled_at, self._sample = self._sample, now, self._usage()
        used = [after - earlier for after, earlier in zip(self._sample, before, strict=True)]
        own = min(stall, used[0])
        others = max(0.0, used[1] - used[0])
        line = (
            f"the {self._name}'s loop stood still for {stall:.1f} s, {own:.1f} s of it at work; its"
            f" other threads worked {others:.1f} s, {used[2]:.0f} page faults read a disk or swap"
        )
        if own > stall / 2:
            return (
                f"{line}: a turn took that long, and all requests waited; a bug in kvd, report it"
            )
        if own + others > stall / 2:
            return (
                f"{line}: the process ran, its loop did not; unless the machine is overloaded this"
                " is a bug in kvd, report it"
            )
        return f"{line}: the process was stopped, or waited for a processor or the system"


_USAGE_SECONDS = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resource usage of this process.

    time: unix seconds. host: the machine's name. max_fds: limit of open descriptors, 0 if none.
    """

    time: float = 0.0
    host: str = ""
    cpu_seconds: float = 0.0
    rss_bytes: int = 0
    open_fds: int = 0
    max_fds: int = 0


class UsageReader:
    """Reads the usage at most once a second, because counting many descriptors is slow."""

    def __init__(self) -> None:
        self._wait_until = 0.0
        self._usage = ProcessUsage(host=os.uname().nodename)

    def read(self) -> ProcessUsage:
        """Return the current time, and usage that is at most a second old."""
        now = time.monotonic()
        if now >= self._wait_until:
            self._wait_until = now + _USAGE_SECONDS
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(OSError):
                # Without a free descriptor the previous values stay.
                _, resident, *_ = Path("/proc/self/statm").read_bytes().split()
                self._usage = replace(
                    self._usage,
                    cpu_seconds=time.process_time(),
                    rss_bytes=int(resident) * _PAGE_BYTES,
                    open_fds=sum(1 for _ in Path("/proc/self/fd").iterdir())
                    - 1,  # without the one used to list them
                    max_fds=0 if limit == resource.RLIM_INFINITY else limit,
                )
        return replace(self._usage, time=time.time())
