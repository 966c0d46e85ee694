"""What clients get descriptors of: directories, and pipes that tell of READY chunks."""

import contextlib
import fcntl
import mmap
import os

from kvd.errors import Refused
from kvd_proto.messages import ErrorCode
from kvd_proto.sizes import format_size

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not in Python's fcntl


class DirectoryMemory:
    """Makes directory buffers and keeps the read-only descriptors, by namespace.

    A directory is an anonymous memory file. The broker keeps the only writable mapping; the file
    is sealed against every later one, and clients get a descriptor opened read-only.
    """

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


class ReadyPipes:
    """Pipes that tell schedulers of their READY chunks, by the engine's number.

    An engine's scheduler gets the read end, so its event loop need not poll. The two ends have
    flags of their own: whatever a client does to its end, a write here never waits; those of an
    eventfd would share them. Where the pipe is full the byte is not needed.
    """

    def __init__(self) -> None:
        self._pipes: dict[int, tuple[int, int]] = {}

    def read_end(self, engine: int) -> list[int]:
        """Return the descriptor for the engine's scheduler, in a list; empty where none is left."""
        if engine not in self._pipes:
            try:
                self._pipes[engine] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:  # its scheduler polls, as without an event loop
                return []
        return [self._pipes[engine][0]]

    def tell(self, engine: int) -> None:
        """Write a byte: chunks of the engine became READY."""
        pipe = self._pipes.get(engine)
        if pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(pipe[1], b"\1")

    def drop(self, engine: int) -> None:
        """Close the pipe of an engine that is gone."""
        for fd in self._pipes.pop(engine, ()):
            os.close(fd)
