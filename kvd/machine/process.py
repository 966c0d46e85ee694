"""A process of the daemon: its end with its broker, its standstills, its usage."""

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvd.errors import ConfigError, ImportFailed, PoolError

SEALED_MEMFD_RECIPE = (
    "memfd_create(MFD_ALLOW_SEALING), ftruncate, then fcntl(F_ADD_SEALS, F_SEAL_SHRINK)"
)
MAX_DIRECTORY_BYTES = 107 - len("/lane-host-99999-ffff.sock")
"""Of the runtime directory: sockaddr_un holds 108 with its final zero, the longest name is a lane's
socket."""
LOCK_SECONDS = 2.0
"""How long a lock is tried that another process has."""
LOCK_RETRY_SECONDS = 0.01
_HIGH_NUMBER = 64  # of a descriptor
_PR_SET_PDEATHSIG = 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call's number
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""
_LONG_SLICE_NS = 100_000_000  # the longest that there is
_GIVING_WAY = 10  # a tenth of the share of others
_OOM_SCORE = 500
MAX_STALL_SECONDS = 1.0  # a turn of a loop takes milliseconds
_SAMPLE_SECONDS = 0.25  # between looks at the processor time, which are system calls


def raise_descriptor_limit() -> None:
    """Have as many descriptors as the hard limit allows: sessions and their memory bring them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_files_remedy() -> str:
    """Return what to do where no descriptor is left, with this process's limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"raise LimitNOFILE (ulimit -n), now {limit}"


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether an error says that no file can be opened, here or on the whole machine."""
    return isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}


def free_descriptors() -> int:
    """Return how many files this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return limit - len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # no paths are needed
    except OSError:  # to look takes one
        return 0


def mode_problem(path: Path, mode: int) -> str:
    """Return what is wrong with a directory of this mode, and the remedy; empty for nothing.

    Where every user may rename and remove files, any user can replace the daemon's by a link or
    another file. The sticky bit prevents that, as on /tmp and /dev/shm.
    """
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return ""
    return (
        f"mode {stat.S_IMODE(mode):04o} lets every user replace the daemon's files there; use a"
        f" directory of its own, or chmod o-w {path}, or chmod +t {path} if others need it"
    )


def check_directory(name: str, path: Path) -> None:
    """Check that only the daemon's user, its group and root can replace its files there.

    Raises:
        ConfigError: every user may; with the remedy.
        OSError: it is not there.
    """
    problem = mode_problem(path, path.stat().st_mode)
    if problem:
        raise ConfigError(f"{name} = {path}: {problem}")


def sealed_size(fd: int, what: str) -> int:
    """Return the size of a file that a worker shares, and that cannot be shortened.

    A file that loses its pages under a mapping ends the process that touches them, and a file of
    any other kind is served by a file system whose owner may answer late or never: it is asked
    nothing, not even its size.

    Raises:
        ImportFailed: it is another kind of file, or could be shortened; how to make one.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # answered by the kernel alone
    except OSError:
        raise ImportFailed(
            f"{what} is no memory file; make it with {SEALED_MEMFD_RECIPE}"
        ) from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ImportFailed(
            f"{what} could be shortened while it is mapped; make it with {SEALED_MEMFD_RECIPE}"
        )
    return os.fstat(fd).st_size


def lock_directory(descriptor: int) -> None:
    """Lock a directory for this process alone.

    A process that is killed while it starts another one leaves its lock to that child, which
    closes it as soon as it runs its own program. So a lock that is held is tried for
    `LOCK_SECONDS`.

    Args:
        descriptor: of the directory; the lock ends with it.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file system locks no directory.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_RETRY_SECONDS)
        else:
            return


def lock_pool(pool_fd: int) -> None:
    """Lock the pool's file for as long as anything of this process can write to it.

    The next daemon waits for that. The lock is on a descriptor of this process's own, opened
    before a device or a medium and with a number as low as there is, because the kernel lets go
    of a dying process's descriptors from the highest number down; never closed.

    Raises:
        PoolError: a daemon that takes the pool over holds the lock: this one's is gone.
    """
    descriptor = os.open(f"/proc/self/fd/{pool_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PoolError("another daemon is taking the pool over") from error


def to_high_number(descriptor: int) -> int:
    """Give a descriptor that will be closed a high number, so that a low one is free.

    Raises:
        PoolError: there is none.
    """
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH_NUMBER)
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise PoolError(
            f"no file descriptor from {_HIGH_NUMBER} on is to be had, the limit is {limit};"
            " raise LimitNOFILE, or ulimit -n"
        ) from error
    os.close(descriptor)
    return moved


def map_pool(pool_fd: int, pool_bytes: int) -> memoryview:
    """Map the pool's file, writable; the descriptor stays the caller's.

    Raises:
        PoolError: the file is smaller than `pool_bytes`, or cannot be mapped.
    """
    have = os.fstat(pool_fd).st_size
    if have < pool_bytes:
        raise PoolError(f"the pool's file has {have} bytes, {pool_bytes} were promised")
    try:
        return memoryview(mmap.mmap(pool_fd, pool_bytes))
    except (OSError, ValueError) as error:
        raise PoolError(f"the pool's {pool_bytes} bytes cannot be mapped: {error}") from error


def die_with_parent() -> None:
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


def prefer_oom_kill() -> None:
    """Have the kernel end this process before the data path's where memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))


def lower_priority() -> None:
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
def gc_paused() -> Iterator[None]:
    """Collect no garbage meanwhile, and leave out later what there is then: it stays for life.

    A collection that looks at all modules takes ten milliseconds, at a start and in a loop.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class StallDetector:
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
        if still <= MAX_STALL_SECONDS:
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
