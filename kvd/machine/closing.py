"""Descriptors that other processes sent: which of them the kernel alone closes, and how others go.

To close a file asks its file system, whose owner may answer late or never (FUSE is told of every
close), and not even SIGKILL ends such a wait. So files of unknown kind are closed in a thread of
their own, which nobody waits for. Whoever can send one may so delay the end of this process.
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
from collections.abc import Sequence

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
    """Closes what may hang, each time in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[threading.Thread, tuple[int, float]] = {}  # users, and since when

    def close(self, fds: Sequence[int], uid: int) -> None:
        """Close descriptors that a process of this user has sent. Never waits."""
        if all(map(is_harmless, fds)):
            _close_all(fds)
        else:
            self._start(tuple(fds), uid)

    def close_socket(self, sock: socket.socket, uid: int) -> None:
        """Close a connection; descriptors may have come there that were not received."""
        if _unread_bytes(sock):
            self._start((sock.detach(),), uid)
        else:
            sock.close()

    def is_held_up(self, uid: int) -> bool:
        """Return whether this user's file systems hold as many threads as they may."""
        since = time.monotonic() - STUCK_SECONDS
        with self._lock:
            held = sum(user == uid and begun < since for user, begun in self._begun.values())
        return held >= MAX_STUCK

    def _start(self, fds: Sequence[int], uid: int) -> None:
        thread = threading.Thread(target=self._run, args=(fds,), daemon=True)
        with self._lock:
            self._begun[thread] = uid, time.monotonic()
        thread.start()

    def _run(self, fds: Sequence[int]) -> None:
        _close_all(fds)
        with self._lock:
            del self._begun[threading.current_thread()]

    def __repr__(self) -> str:
        return f"<Closer, {len(self._begun)} threads>"


def _unread_bytes(sock: socket.socket) -> int:
    count = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock, termios.FIONREAD, count)
    return int.from_bytes(count, "little")


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
