"""A listening Unix socket that can refuse a connection when no descriptor is left for it."""

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvd.errors import ConfigError
from kvd.machine.open_files import is_out_of_files, open_files_remedy

BACKLOG = 1024

log = logging.getLogger("kvd.wire")


class NoDescriptor(OSError):
    """A connection waits, and this process may open no more files."""


class Listener:
    """A listening socket, not blocking; its group may connect.

    Args:
        path: where to listen; nothing may be there.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.socket.bind(str(path))
            path.chmod(0o660)
            self.socket.listen(BACKLOG)
            # Closed to accept, and close, a connection for which no descriptor is left.
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.socket.close()
            raise ConfigError(
                f"{path}: {error.strerror}; choose a directory that this user may write, with"
                " --runtime-dir"
            ) from error
        self.socket.setblocking(False)  # the socket API's own form

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self.socket.fileno()

    def accept(self) -> socket.socket | None:
        """Return the next connection; None where none waits.

        Raises:
            NoDescriptor: one waits, and there is no descriptor for it.
        """
        try:
            return self.socket.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            if is_out_of_files(error):
                raise NoDescriptor(*error.args) from error
            raise

    def refuse(self, close: Callable[[socket.socket], None]) -> None:
        """Close the next connection, for which there is no descriptor, by `close`."""
        log.error("no file descriptor is left for a connection; %s", open_files_remedy())
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            close(self.socket.accept()[0])
        with contextlib.suppress(OSError):  # taken by another thread; then without one
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Listen no more."""
        self.socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
