"""Close descriptors that other processes sent, without waiting for their file systems.

close(2) calls the file system: FUSE asks its server, a TCP socket may linger. The server may answer
late or never, and SIGKILL does not end the wait. Memory files and devices are closed at once, all
others in threads that nothing waits for. The sender of such a file can delay the exit of this
process.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvd_proto.channel import close_all

MAX_STUCK = 4
"""Threads that a user's file systems may hold before its connections are refused."""
STUCK_SECONDS = 1.0
"""How long a thread may take before it counts as held."""
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000  # linux/fcntl.h, linux/stat.h
_STATX_BYTES = 256
_MODE = struct.Struct("28xH")  # struct statx: stx_mode
_libc = ctypes.CDLL(None, use_errno=True)


def is_harmless(fd: int) -> bool:
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


class Closer:
    """Closes what may hang, in a few threads for each user that sends such files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Sequence[int]]] = {}  # for a thread, by user
        self._begun: dict[threading.Thread, tuple[int, float]] = {}  # users; the present close

    def close(self, fds: Sequence[int], uid: int) -> None:
        """Close descriptors that a process of this user has sent. Never waits."""
        if all(map(is_harmless, fds)):
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

    def is_held_up(self, uid: int) -> bool:
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
