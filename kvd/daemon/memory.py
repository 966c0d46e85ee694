"""Memory that other processes map: the pool's file and the directories.

The pool is a file on tmpfs that lanes map and clients never see; what becomes of it
when the daemon ends is the business of `kvd.daemon.kept_pool`. Its pages are
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

from kvd.errors import PoolError, Refused
from kvd.machine.cgroup import memory_limit
from kvd.machine.filesystem import Filesystem
from kvd.pool.filling import FillOrder
from kvd_proto.messages import ErrorCode
from kvd_proto.sizes import format_size

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not in Python's fcntl
_STEP = 64 * 2**20


class PoolMemory:
    """The pool's file.

    Args:
        path: where it lies; a file that is there is used with what it holds. A larger one keeps
            its size until `settle`.
        nbytes: its size at least; it has whole pages.

    Attributes:
        fresh: no memory was there.

    Raises:
        PoolError: it cannot be made, with the figures.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.allocated = 0  # bytes in the order of filling
        self.error = ""
        try:
            filesystem = Filesystem.of(path.parent)
            self.nbytes = filesystem.whole_pages(nbytes)
            self.fill = FillOrder.of(self.nbytes, filesystem.page_bytes)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self.fd = os.open(path, flags, 0o600)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, self.fd)
                status = os.fstat(self.fd)
                held, size = status.st_blocks * 512, status.st_size
                self.fresh = not held
                problem = lack_of_room(filesystem, nbytes, held)
                if problem:
                    if self.fresh:
                        path.unlink()
                    raise PoolError(problem)
                self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                undo.callback(os.close, self._wake_read)
                undo.callback(os.close, self._wake_write)
                os.ftruncate(self.fd, max(self.nbytes, size))
                undo.pop_all()
        except OSError as error:
            raise PoolError(f"{path}: the pool cannot be made: {error.strerror}") from error
        self._size_before: int | None = size
        if held >= max(self.nbytes, size):
            self.allocated = self.nbytes
        # Lanes touch what is allocated, and count it; where some of it is there already and
        # some is not, only a whole pool is safe to touch.
        self._patchy = not self.fresh and not self.allocated
        self._exclusive = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._allocate, name="kvd-pool", daemon=True)

    def start(self) -> None:
        """Start the thread that allocates."""
        self._thread.start()

    @property
    def done_fd(self) -> int:
        """A descriptor that is readable when a piece is allocated, or allocation has ended."""
        return self._wake_read

    @property
    def may_be_written(self) -> bool:
        """Whether lanes may start: no lane of a dead daemon can still write here.

        Every lane holds a lock on the pool's file for as long as anything of it can move bytes.
        """
        if not self._exclusive:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            self._exclusive = True
        return self.ready or not self._patchy

    def _allocate(self) -> None:
        try:
            if self.allocated < self.nbytes:
                self._allocate_all()
        except OSError as error:
            self.error = (
                f"{self.path}: {error.strerror} after {format_size(self.allocated)} of"
                f" {format_size(self.nbytes)}; choose a smaller --cpu-bytes"
            )
        self._wake()

    def _allocate_all(self) -> None:
        for piece in self.fill.order:
            begin, end = self.fill.span(piece)
            for start in range(begin, end, _STEP):
                if self._stop.is_set():
                    return
                os.posix_fallocate(self.fd, start, min(_STEP, end - start))
            self.allocated += end - begin
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            os.write(self._wake_write, b"x")

    @property
    def ready(self) -> bool:
        """Whether every page is allocated."""
        return self.allocated >= self.nbytes and not self.error

    def settle(self) -> None:
        """Cut the file to the size of this pool."""
        os.ftruncate(self.fd, self.nbytes)
        self._size_before = None

    def close(self) -> None:
        """Stop allocating and close the file; without `settle` it gets its old size again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._size_before is not None:
            os.ftruncate(self.fd, self._size_before)
        for fd in (self.fd, self._wake_read, self._wake_write):
            os.close(fd)

    def __repr__(self) -> str:
        return f"<PoolMemory {format_size(self.allocated)} of {format_size(self.nbytes)}>"


def lack_of_room(filesystem: Filesystem, nbytes: int, held: int) -> str:
    """Return why a pool of `nbytes` does not fit, with figures and remedy; empty where it does.

    Args:
        filesystem: where the pool's file goes.
        nbytes: the pool's size.
        held: bytes that a file there takes now and the pool uses again.
    """
    room, wanted = filesystem.room + held, filesystem.whole_pages(nbytes)
    if room < wanted:
        return (
            f"a pool of {format_size(nbytes)} does not fit {filesystem.directory}, which has"
            f" {format_size(room)} left; {filesystem.remedy(wanted, wanted - room)}"
        )
    group = memory_limit() if filesystem.is_memory else None
    if group is not None and wanted - held > group.limit:
        return (
            f"a pool of {format_size(nbytes)} does not fit the control group {group.group}, which"
            f" may take {format_size(group.limit)}; choose a smaller --cpu-bytes or raise the limit"
            " (memory.max, MemoryMax=, resources.limits.memory)"
        )
    return ""


class DirectoryMemory:
    """Makes directory buffers and keeps the read-only descriptors, by namespace."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def make(self, name: str, nbytes: int) -> mmap.mmap:
        """Return a zeroed writable buffer; its read-only descriptor is kept under `name`.

        Raises:
            Refused: NOT_READY where there is no descriptor or memory for it now.
        """
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            with os.fdopen(os.memfd_create(f"kvd-directory-{name[:8]}", flags), "r+b") as file:
                fd = file.fileno()
                os.ftruncate(fd, nbytes)
                buffer = mmap.mmap(fd, nbytes)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
                self.drop(name)
                self._fds[name] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Refused(
                ErrorCode.NOT_READY,
                f"no directory of {format_size(nbytes)} can be made now: {error.strerror};"
                " raise LimitNOFILE (ulimit -n) or free memory, it is tried again",
            ) from error
        return buffer

    def fd(self, name: str) -> int:
        """Return the read-only descriptor."""
        return self._fds[name]

    def drop(self, name: str) -> None:
        """Close one namespace's descriptor, if there is one."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptors; mappings live on where they are."""
        for name in list(self._fds):
            self.drop(name)

    def __repr__(self) -> str:
        return f"<DirectoryMemory of {len(self._fds)} namespaces>"
