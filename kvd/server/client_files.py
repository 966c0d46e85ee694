"""What clients get descriptors of: directories, descriptions, and pipes that tell of READY chunks.

A directory is an anonymous memory file. The broker keeps the only writable mapping; the file is
sealed against every later one, and clients get a descriptor opened read-only.

Descriptions lie in one file for each namespace. A file is sparse, written with `os.pwrite` and
never mapped: on a full filesystem a description is lost, and not the daemon. Clients get a
descriptor that reads only.
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
    """Makes directory buffers and keeps the read-only descriptors, by namespace.

    A directory is an anonymous memory file. The broker keeps the only writable mapping; the file
    is sealed against every later one, and clients get a descriptor opened read-only.
    """

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def make(self, name: str, nbytes: int) -> mmap.mmap:
        """Return a zeroed writable buffer; its read-only descriptor is kept under `name`.

        Raises:
            Refusal: NOT_READY where there is no descriptor or memory for it now.
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


class DescriptionFile:
    """The descriptions of one namespace.

    Args:
        path: of the file. One that has records of this size is gone on with, as that of the daemon
            before; another one is made anew.
        record_bytes: of a slot.
        kept: it stays for the next daemon; else it has no name any more.

    Attributes:
        max_bytes: that a description may have.
        read_fd: reads only.

    Raises:
        OSError: it cannot be made now.
    """

    def __init__(self, path: Path, record_bytes: int, *, kept: bool) -> None:
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
            if not kept:
                path.unlink()
        except OSError:
            self.close()
            raise

    def write(self, slot: int, generation: int, description: bytes) -> bool:
        """Keep the description of the slot's chunk; False where there is no room."""
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
    """Those of all namespaces, by the namespace's id in hex.

    Args:
        open_file: opens that of a namespace, with records of so many bytes; may raise OSError.
    """

    def __init__(self, open_file: Callable[[str, int], DescriptionFile]) -> None:
        self._open_file = open_file
        self._files: dict[str, DescriptionFile] = {}

    def make(self, name: str, record_bytes: int) -> DescriptionFile | None:
        """Open a namespace's file; None where that cannot be now, and the log says why."""
        self.drop(name)
        try:
            file = self._files[name] = self._open_file(name, record_bytes)
        except OSError as error:
            log.warning(
                "namespace %s: its chunks are stored without descriptions, so that routers learn"
                " no token ids of them (%s); raise LimitNOFILE (ulimit -n) or make room, it is"
                " tried again when an engine attaches",
                name[:8],
                error,
            )
            return None
        return file

    def read_fds(self, name: str) -> list[int]:
        """Return the descriptor that reads a namespace's file, in a list; empty without a file."""
        file = self._files.get(name)
        return [] if file is None else [file.read_fd]

    def drop(self, name: str) -> None:
        """Close a namespace's file, if there is one."""
        file = self._files.pop(name, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close them all."""
        for name in list(self._files):
            self.drop(name)
