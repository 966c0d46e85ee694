"""Memory that outlives no one by accident: the pool's file and the directories.

The pool is a file on tmpfs that lanes map and clients never see. Its pages are
allocated by a thread of its own, so that a full /dev/shm is an error message
at start and not a SIGBUS under load, and so that the broker answers meanwhile.

A directory is an anonymous memory file. The broker keeps the only writable
mapping; the file is sealed against every later one, and what travels to
clients is a descriptor opened read-only.
"""

import contextlib
import fcntl
import mmap
import os
import threading
from pathlib import Path

from kvd.errors import PoolError
from kvd.filling import FillOrder
from kvd_proto.sizes import format_size

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not in Python's fcntl
_STEP = 64 * 2**20


class PoolMemory:
    """The pool's file.

    Args:
        path: where it lies; an older file there is replaced.
        nbytes: its size.

    Raises:
        PoolError: it cannot be made, with the figures.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.fill = FillOrder.of(nbytes)
        self.allocated = 0  # bytes in the order of filling
        self.error = ""
        try:
            free = os.statvfs(path.parent)
            room = free.f_bavail * free.f_frsize
            if room < nbytes:
                raise PoolError(
                    f"a pool of {format_size(nbytes)} does not fit {path.parent}, which has"
                    f" {format_size(room)} left; choose a smaller --cpu-bytes or enlarge the"
                    f" filesystem (mount -o remount,size=… {path.parent})"
                )
            path.unlink(missing_ok=True)
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise PoolError(f"{path}: the pool cannot be made: {error.strerror}") from error
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._allocate, name="kvd-pool", daemon=True)

    def start(self) -> None:
        """Begin to allocate."""
        self._thread.start()

    @property
    def done_fd(self) -> int:
        """The descriptor that becomes readable when a piece is there, or allocation has ended."""
        return self._wake_read

    def _allocate(self) -> None:
        try:
            for piece in self.fill.order:
                begin, end = self.fill.span(piece)
                for start in range(begin, end, _STEP):
                    if self._stop.is_set():
                        return
                    os.posix_fallocate(self.fd, start, min(_STEP, end - start))
                self.allocated += end - begin
                self._wake()
        except OSError as error:
            self.error = (
                f"{self.path}: {error.strerror} after {format_size(self.allocated)} of"
                f" {format_size(self.nbytes)}; choose a smaller --cpu-bytes"
            )
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            os.write(self._wake_write, b"x")

    @property
    def ready(self) -> bool:
        """Every page is there."""
        return self.allocated >= self.nbytes and not self.error

    def close(self) -> None:
        """Stop allocating and give the memory back."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for fd in (self.fd, self._wake_read, self._wake_write):
            os.close(fd)
        self.path.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<PoolMemory {format_size(self.allocated)} of {format_size(self.nbytes)}>"


class DirectoryMemory:
    """Makes directory buffers and keeps the read-only descriptors, by namespace."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def make(self, name: str, nbytes: int) -> mmap.mmap:
        """A zeroed writable buffer of `nbytes`; its read-only descriptor is kept under `name`."""
        fd = os.memfd_create(f"kvd-directory-{name[:8]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            buffer = mmap.mmap(fd, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
            old = self._fds.pop(name, None)
            if old is not None:
                os.close(old)
            self._fds[name] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        return buffer

    def fd(self, name: str) -> int:
        """The read-only descriptor."""
        return self._fds[name]

    def drop(self, name: str) -> None:
        """Close one namespace's descriptor."""
        os.close(self._fds.pop(name))

    def close(self) -> None:
        """Close the descriptors; mappings live on where they are."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __repr__(self) -> str:
        return f"<DirectoryMemory of {len(self._fds)} namespaces>"
