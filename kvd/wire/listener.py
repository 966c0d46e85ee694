"""Listening sockets, and the closing of descriptors that clients sent.

close(2) of a file calls its file system: FUSE asks its server, a TCP socket may linger. The server
may answer late or never, and SIGKILL does not end the wait. So memory files and devices are closed
at once, all other descriptors in threads that nothing waits for. The sender of such a file can
delay the exit of this process.
"""

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
"""Threads in which closes of a user's files may hang before its connections are refused."""
STUCK_SECONDS = 1.0
"""Duration of a close from which on it counts as hanging."""
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000  # linux/fcntl.h, linux/stat.h
_STATX_BYTES = 256
_MODE = struct.Struct("28xH")  # struct statx: stx_mode
_libc = ctypes.CDLL(None, use_errno=True)

log = logging.getLogger("kvd.wire")


class NoDescriptor(OSError):
    """A connection waits, but this process can open no more files."""


class Listener:
    """A non-blocking Unix socket that listens; its group may connect.

    Args:
        path: of the socket; must not exist.

    Raises:
        ConfigError: the socket cannot be bound.
    """

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.socket.bind(str(path))
            path.chmod(0o660)
            self.socket.listen(BACKLOG)
            # Closed when no descriptor is left, to accept and close a connection.
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
        """Return the next connection; None if none waits.

        Raises:
            NoDescriptor: a connection waits, but no descriptor is left.
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
        """Accept the next connection with the spare descriptor, and close it by `close`."""
        log.error("no file descriptor is left for a connection; %s", open_files_remedy())
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            close(self.socket.accept()[0])
        with contextlib.suppress(OSError):  # another thread took it; then there is no spare
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def bind_tcp(listen: ListenAddress) -> socket.socket:
    """Return a non-blocking listening socket for the setting `http_listen`.

    Raises:
        ConfigError: the address cannot be bound; the text has the remedy.
        AddressUnavailable: likewise, but the address may become available.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"http_listen = {listen}: no such host ({error})",
            "use an address of this machine, such as 127.0.0.1:9330, or off",
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
        may_pass = error.errno in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}
        raise (AddressUnavailable if may_pass else ConfigError)(
            f"http_listen = {listen}: {reason}",
            "choose another with --http-listen HOST:PORT, or --http-listen off",
        ) from error
    listener.setblocking(False)  # the socket API's own form
    return listener


def closes_at_once(fd: int) -> bool:
    """Return whether closing the descriptor calls no file system; the check calls none either.

    True for memory files, which report their seals, for devices such as CUDA's, and for anonymous
    objects of the kernel.
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
    """Return whether it is an anonymous kernel object; other files show a path."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith("anon_inode:")  # noqa: PTH115  # no path


class DescriptorCloser:
    """Closes descriptors whose close may hang, in up to `MAX_STUCK` threads for each user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Sequence[int]]] = {}  # for a thread, by uid
        self._closing: dict[
            threading.Thread, tuple[int, float]
        ] = {}  # uid, and start of the current close

    def close(self, fds: Sequence[int], uid: int) -> None:
        """Close descriptors that a process of `uid` has sent; never blocks."""
        if all(map(closes_at_once, fds)):
            close_all(fds)
        else:
            self._put(tuple(fds), uid)

    def close_socket(self, sock: socket.socket, uid: int) -> None:
        """Close a connection; unread bytes may carry descriptors, which are closed with it."""
        with contextlib.suppress(OSError):  # the peer has gone
            sock.shutdown(socket.SHUT_RDWR)
        if _unread_bytes(sock):
            self._put((sock.detach(),), uid)
        else:
            sock.close()

    def is_stuck(self, uid: int) -> bool:
        """Return whether closes of this user's files hang in `MAX_STUCK` threads."""
        since = time.monotonic() - STUCK_SECONDS
        with self._lock:
            num_stuck = sum(user == uid and start < since for user, start in self._closing.values())
        return num_stuck >= MAX_STUCK

    def _put(self, fds: Sequence[int], uid: int) -> None:
        with self._lock:
            self._waiting.setdefault(uid, deque()).append(fds)
            if sum(user == uid for user, _ in self._closing.values()) >= MAX_STUCK:
                return
            thread = threading.Thread(target=self._run, args=(uid,), daemon=True)
            self._closing[thread] = uid, time.monotonic()
        try:
            thread.start()
        except RuntimeError:  # no thread can be started; the next close retries
            with self._lock:
                del self._closing[thread]

    def _run(self, uid: int) -> None:
        thread = threading.current_thread()
        while True:
            with self._lock:
                if not (queue := self._waiting.get(uid)):
                    self._waiting.pop(uid, None)
                    del self._closing[thread]
                    return
                fds = queue.popleft()
                self._closing[thread] = uid, time.monotonic()
            close_all(fds)


def _unread_bytes(sock: socket.socket) -> int:
    nbytes = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock, termios.FIONREAD, nbytes)
    return int.from_bytes(nbytes, "little")
