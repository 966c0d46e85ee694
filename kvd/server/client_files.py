"""Files whose descriptors clients get: directories, descriptions, and pipes that signal READY.

Descriptions lie in one sparse file for each namespace. It is written with `os.pwrite` and never
mapped: on a full filesystem a description is lost instead of a SIGBUS ending the daemon. Clients
get a read-only descriptor.
"""

import contextlib
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from kvd.errors import Refusal
from kvd.server.state_files import is_own_file, remove_tree
from kvd_proto.descriptions import (
    max_description_bytes,
    pack_header,
    pack_record,
    read_header,
    record_offset,
)
from kvd_proto.messages import ErrorCode
from kvd_proto.text import format_size

log = logging.getLogger("kvd.daemon")
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not in Python's fcntl


class DirectoryMemory:
    """Creates directory buffers, and holds their read-only descriptors by namespace.

    A directory is an anonymous memory file. The broker has the only writable mapping; the file is
    sealed against further ones, and clients get a read-only descriptor.
    """

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def make(self, name: str, nbytes: int) -> mmap.mmap:
        """Return a zeroed writable buffer; `fd(name)` is its read-only descriptor.

        Raises:
            Refusal: NOT_READY if there is no descriptor or memory now.
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
            raise Refusal(
                ErrorCode.NOT_READY,
                f"no directory of {format_size(nbytes)} can be created now: {error.strerror};"
                " raise LimitNOFILE (ulimit -n) or free memory, the engine retries",
            ) from error
        return buffer

    def fd(self, name: str) -> int:
        """Return a namespace's read-only descriptor."""
        return self._fds[name]

    def drop(self, name: str) -> None:
        """Close a namespace's descriptor, if any."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptors; existing mappings stay valid."""
        for name in list(self._fds):
            self.drop(name)


class ReadyPipes:
    """Pipes that signal schedulers that chunks became READY, by the engine's number.

    An engine's scheduler gets the read end, so its event loop need not poll. The two ends have
    separate flags, unlike an eventfd: whatever a client sets on its end, a write here never blocks.
    If the pipe is full, the scheduler has a signal pending, and the byte is dropped.
    """

    def __init__(self) -> None:
        self._pipes: dict[int, tuple[int, int]] = {}

    def read_end(self, engine: int) -> list[int]:
        """Return a list of the scheduler's read end; empty if no descriptor is left."""
        if engine not in self._pipes:
            try:
                self._pipes[engine] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:  # the scheduler polls instead
                return []
        return [self._pipes[engine][0]]

    def signal(self, engine: int) -> None:
        """Signal that chunks of the engine became READY."""
        pipe = self._pipes.get(engine)
        if pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(pipe[1], b"\1")

    def drop(self, engine: int) -> None:
        """Close the pipe of an engine that has ended."""
        for fd in self._pipes.pop(engine, ()):
            os.close(fd)


class DescriptionFile:
    """The descriptions of one namespace.

    Args:
        path: of the file. Records of `record_bytes`, from the previous daemon, are retained; a file
            with other records is truncated.
        record_bytes: of a slot.
        persistent: leave the file to the next daemon; else it is unlinked now.

    Attributes:
        max_bytes: of a description.
        read_fd: a read-only descriptor.

    Raises:
        OSError: the file cannot be opened now.
    """

    def __init__(self, path: Path, record_bytes: int, *, persistent: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not is_own_file(path.lstat()):
                remove_tree(path)
        self.max_bytes = max_description_bytes(record_bytes)
        self.read_fd = -1
        self._record_bytes = record_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        try:
            if read_header(self._fd) != record_bytes:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, pack_header(record_bytes), 0)
            self.read_fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if not persistent:
                path.unlink()
        except OSError:
            self.close()
            raise

    def write(self, slot: int, generation: int, description: bytes) -> bool:
        """Store the description of the slot's chunk; return False if there is no space."""
        record = pack_record(slot, generation, description)
        try:
            written = os.pwrite(self._fd, record, record_offset(slot, self._record_bytes))
        except OSError:
            return False
        return written == len(record)

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self._fd, self.read_fd):
            if fd >= 0:
                os.close(fd)


class DescriptionFiles:
    """The description files of all namespaces, by the namespace's id in hex.

    Args:
        open_file: opens a namespace's file, given its id and record size; may raise OSError.
    """

    def __init__(self, open_file: Callable[[str, int], DescriptionFile]) -> None:
        self._open_file = open_file
        self._files: dict[str, DescriptionFile] = {}

    def make(self, name: str, record_bytes: int) -> DescriptionFile | None:
        """Open a namespace's file; return None and log the reason if that fails."""
        self.drop(name)
        try:
            file = self._files[name] = self._open_file(name, record_bytes)
        except OSError as error:
            log.warning(
                "namespace %s: its chunks are stored without descriptions, so routers get no token"
                " ids for them (%s); raise LimitNOFILE (ulimit -n) or free space, kvd retries when"
                " an engine attaches",
                name[:8],
                error,
            )
            return None
        return file

    def read_fds(self, name: str) -> list[int]:
        """Return a list of the read-only descriptor of a namespace's file; empty without a file."""
        file = self._files.get(name)
        return [] if file is None else [file.read_fd]

    def drop(self, name: str) -> None:
        """Close a namespace's file, if any."""
        file = self._files.pop(name, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close all files."""
        for name in list(self._files):
            self.drop(name)
