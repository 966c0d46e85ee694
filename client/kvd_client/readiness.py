"""Descriptors that event loops wait for.

Each is an epoll descriptor over what the package itself waits for. All of it is
level-triggered: it stays readable until the object's own call has processed the news.
"""

import contextlib
import ctypes
import os
import select
import threading
import time

REMINDER_SECONDS = 1
_CLOCK_MONOTONIC = 1
_libc = ctypes.CDLL(None, use_errno=True)
_ONE_REMINDER = (ctypes.c_long * 4)(0, 0, REMINDER_SECONDS, 0)  # struct itimerspec


class Readiness:
    """A descriptor for an event loop. May be used by any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._flag = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._flag, select.EPOLLIN)
        self._is_set = False
        self._timer = -1  # timerfd_create(2); Python has it from 3.13 on
        self._reminds_at = 0.0

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._epoll.fileno()

    def watch(self, fd: int, events: int = select.EPOLLIN) -> None:
        """Be readable while `fd` is; nothing once this is closed, by another thread perhaps."""
        try:
            self._epoll.register(fd, events)
        except (OSError, ValueError):
            if not self._epoll.closed:
                raise

    def unwatch(self, fd: int) -> None:
        """Forget `fd`, which is about to be closed."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def set(self) -> None:
        """Be readable until `clear`. Not in two threads at once, nor with `clear`."""
        if not self._is_set and not self._epoll.closed:
            self._is_set = True
            os.eventfd_write(self._flag, 1)

    def remind(self) -> None:
        """Be readable once in `REMINDER_SECONDS`, or at once as before. Under the lock of `set`."""
        if self._reminds_at or self._epoll.closed:
            return
        if self._timer < 0:
            flags = os.O_CLOEXEC | os.O_NONBLOCK
            self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, flags)
            if self._timer < 0:
                return  # no descriptor is free: the next call tries again
            self._epoll.register(self._timer, select.EPOLLIN)
        self._reminds_at = time.monotonic() + REMINDER_SECONDS
        _libc.timerfd_settime(self._timer, 0, _ONE_REMINDER, None)

    def clear(self) -> bool:
        """Undo `set`, and a reminder that has come; return whether `set` was called before."""
        if self._reminds_at and time.monotonic() >= self._reminds_at and not self._epoll.closed:
            with contextlib.suppress(BlockingIOError):
                os.read(self._timer, 8)
                self._reminds_at = 0.0
        if not self._is_set or self._epoll.closed:
            return False
        self._is_set = False
        os.eventfd_read(self._flag)
        return True

    def close(self) -> None:
        """Close the descriptors."""
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._flag)
            if self._timer >= 0:
                os.close(self._timer)


class ReadyNews(Readiness):
    """What a scheduler's event loop waits for: the daemon's pipe, and changes of the session.

    The pipe comes with each attachment. It is no eventfd, because the two ends of a pipe have flags
    of their own: whatever a client does to its end, the daemon's write never waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._pipe = -1

    def replace(self, pipe: int) -> None:
        """Watch this pipe, which is owned from now on, in place of the one before; -1: none."""
        with self._lock:
            self._drop_pipe()
            self._pipe = pipe
            if pipe >= 0:
                self.watch(pipe)

    def set(self) -> None:
        """Wake up the event loop: something has happened."""
        with self._lock:
            super().set()

    def take(self) -> bool:
        """Return whether anything has happened since the last call."""
        with self._lock:
            news = self.clear()
            while self._pipe >= 0:
                try:
                    written = os.read(self._pipe, 4096)
                except BlockingIOError:
                    break
                news = True
                if not written:  # the daemon has ended
                    self._drop_pipe()
            return news

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            super().close()
            self._drop_pipe()

    def abandon(self) -> None:
        """Close them in a forked child, without the parent's lock or a change of its epoll."""
        self._lock = threading.Lock()
        self.close()

    def _drop_pipe(self) -> None:
        if self._pipe >= 0:
            self.unwatch(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
