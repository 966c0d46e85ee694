"""Files of the daemon: how many may be open, who may write them, their locks, and closing others'.

close(2) calls the file system: FUSE asks its server, a TCP socket may linger. The server may answer
late or never, and SIGKILL does not end the wait. So of descriptors that other processes sent,
memory files and devices are closed at once, all others in threads that nothing waits for. The
sender of such a file can delay the exit of this process.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import stat
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from kvd.errors import ConfigError, ImportFailed, PoolError
from kvd_proto.channel import close_all

HOW = "memfd_create(MFD_ALLOW_SEALING), ftruncate, then fcntl(F_ADD_SEALS, F_SEAL_SHRINK)"
MAX_DIRECTORY_BYTES = 107 - len("/lane-host-99999-ffff.sock")
"""Of the runtime directory: sockaddr_un holds 108 with its final zero, the longest name is a lane's
socket."""
LOCK_SECONDS = 2.0
"""How long a lock is tried that another process has."""
LOCK_RETRY_SECONDS = 0.01
_HIGH_NUMBER = 64  # of a descriptor
MAX_STUCK = 4
"""Threads that a user's file systems may hold before its connections are refused."""
STUCK_SECONDS = 1.0
"""How long a thread may take before it counts as held."""
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000  # linux/fcntl.h, linux/stat.h
_STATX_BYTES = 256
_MODE = struct.Struct("28xH")  # struct statx: stx_mode
_libc = ctypes.CDLL(None, use_errno=True)


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


def danger(path: Path, mode: int) -> str:
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


def check_place(name: str, path: Path) -> None:
    """Check that only the daemon's user, its group and root can replace its files there.

    Raises:
        ConfigError: every user may; with the remedy.
        OSError: it is not there.
    """
    problem = danger(path, path.stat().st_mode)
    if problem:
        raise ConfigError(f"{name} = {path}: {problem}")


def size_of(fd: int, what: str) -> int:
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
        raise ImportFailed(f"{what} is no memory file; make it with {HOW}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ImportFailed(f"{what} could be shortened while it is mapped; make it with {HOW}")
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


def hold_pool(pool_fd: int) -> None:
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


def move_up(descriptor: int) -> int:
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


def is_harmless(fd: int) -> bool:
    """Return whether the kernel alone closes the descriptor. No file system is asked.

    So it is with memory files, which answer for their seals; devices, such as CUDA's; and objects
    of the kernel without a name.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return _is_device(fd) or _has_no_name(fd)
    return True


def _is_device(fd: int) -> bool:
    attributes = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, 0, attributes):
        return False
    return stat.S_ISCHR(_MODE.unpack_from(attributes)[0])


def _has_no_name(fd: int) -> bool:
    """Files of a file system are shown with a path, which begins with a slash."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith("anon_inode:")  # noqa: PTH115  # no path


class Closer:
    """Closes what may hang, in a few threads for each user that sends such files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Sequence[int]]] = {}  # for a thread, by user
        self._begun: dict[threading.Thread, tuple[int, float]] = {}  # users; the present close

    def close(self, fds: Sequence[int], uid: int) -> None:
        """Close descriptors that a process of this user has sent. Never waits."""
        if all(map(is_harmless, fds)):
            close_all(fds)
        else:
            self._put(tuple(fds), uid)

    def close_socket(self, sock: socket.socket, uid: int) -> None:
        """Close a connection; descriptors may have come there that were not received."""
        with contextlib.suppress(OSError):  # nothing more is to come
            sock.shutdown(socket.SHUT_RDWR)
        if _unread_bytes(sock):
            self._put((sock.detach(),), uid)
        else:
            sock.close()

    def is_held_up(self, uid: int) -> bool:
        """Return whether this user's file systems hold as many threads as they may."""
        since = time.monotonic() - STUCK_SECONDS
        with self._lock:
            stuck = sum(user == uid and begun < since for user, begun in self._begun.values())
        return stuck >= MAX_STUCK

    def _put(self, fds: Sequence[int], uid: int) -> None:
        with self._lock:
            self._waiting.setdefault(uid, deque()).append(fds)
            if sum(user == uid for user, _ in self._begun.values()) >= MAX_STUCK:
                return
            thread = threading.Thread(target=self._run, args=(uid,), daemon=True)
            self._begun[thread] = uid, time.monotonic()
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had; the next close tries again
            with self._lock:
                del self._begun[thread]

    def _run(self, uid: int) -> None:
        thread = threading.current_thread()
        while True:
            with self._lock:
                if not (waiting := self._waiting.get(uid)):
                    self._waiting.pop(uid, None)
                    del self._begun[thread]
                    return
                fds = waiting.popleft()
                self._begun[thread] = uid, time.monotonic()
            close_all(fds)


def _unread_bytes(sock: socket.socket) -> int:
    count = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock, termios.FIONREAD, count)
    return int.from_bytes(count, "little")
