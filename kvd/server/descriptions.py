"""The files that hold the descriptions of chunks, one for each namespace.

A file is sparse, written with `os.pwrite` and never mapped: on a full filesystem a description is
lost, and not the daemon. Clients get a descriptor that reads only.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from kvd.server.pool_files import is_own_file, remove_tree
from kvd_proto.descriptions import pack_header, pack_record, place, read_header, room

log = logging.getLogger("kvd.daemon")


class DescriptionFile:
    """The descriptions of one namespace.

    Args:
        path: of the file. One that has records of this size is gone on with, as that of the daemon
            before; another one is made anew.
        record_bytes: of a slot.
        kept: it stays for the next daemon; else it has no name any more.

    Attributes:
        room: bytes that a description may have.
        read_fd: reads only.

    Raises:
        OSError: it cannot be made now.
    """

    def __init__(self, path: Path, record_bytes: int, *, kept: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not is_own_file(path.lstat()):
                remove_tree(path)
        self.room = room(record_bytes)
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
            written = os.pwrite(self._fd, record, place(slot, self._record_bytes))
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
