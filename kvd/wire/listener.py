"""Listening sockets: a Unix one, which can refuse where no descriptor is left, and TCP."""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvd.config.values import Listen
from kvd.errors import AddressUnavailable, ConfigError
from kvd.machine.files import is_out_of_files, open_files_remedy

BACKLOG, TCP_BACKLOG = 1024, 128

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


def bind_tcp(listen: Listen) -> socket.socket:
    """Return a non-blocking listening socket for the setting `http_listen`.

    Raises:
        ConfigError: the address cannot be bound; the text has the remedy.
        AddressUnavailable: likewise, and it may be free or there later.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"http_listen = {listen}: no such host ({error}); use an address of this machine,"
            " such as 127.0.0.1:9330, or off"
        ) from error
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(TCP_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = f"the port is in use (ss -ltnp 'sport = :{listen.port}' shows by whom)"
        passes = error.errno in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}
        raise (AddressUnavailable if passes else ConfigError)(
            f"http_listen = {listen}: {reason}; choose another with --http-listen HOST:PORT, or"
            " --http-listen off"
        ) from error
    listener.setblocking(False)  # the socket API's own form
    return listener
