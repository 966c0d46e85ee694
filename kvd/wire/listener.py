"""Listening sockets: a Unix one, which can refuse where no descriptor is left, and TCP."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvd.config.values import ListenAddress
from kvd.errors import AddressUnavailable, ConfigError
from kvd.machine.process import is_out_of_files, open_files_remedy
from kvd_proto.channel import close_all

BACKLOG, TCP_BACKLOG = 1024, 128
MAX_STUCK = 4
"""Threads that a user's file systems may hold before its connections are refused."""
STUCK_SECONDS = 1.0
"""How long a thread may take before it counts as held."""
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000  # linux/fcntl.h, linux/stat.h
_STATX_BYTES = 256
_MODE = struct.Struct("28xH")  # struct statx: stx_mode
_libc = ctypes.CDLL(None, use_errno=True)

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
        """ListenAddress no more."""
        self.socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def bind_tcp(listen: ListenAddress) -> socket.socket:
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


def closes_at_once(fd: int) -> bool:
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


class DescriptorCloser:
    """Closes what may hang, in a few threads for each user that sends such files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Sequence[int]]] = {}  # for a thread, by user
        self._begun: dict[threading.Thread, tuple[int, float]] = {}  # users; the present close

    def close(self, fds: Sequence[int], uid: int) -> None:
        """Close descriptors that a process of this user has sent. Never waits."""
        if all(map(closes_at_once, fds)):
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

    def is_stuck(self, uid: int) -> bool:
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
