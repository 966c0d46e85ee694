"""Descriptors that event loops poll.

Each is an epoll descriptor over the descriptors that the package itself polls. All are
level-triggered: one stays readable until the object's own call has processed the event.
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
    """A descriptor for an event loop.

    The owner calls `set`, `remind` and `clear` under one lock; any thread may call the others.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._flag = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._flag, select.EPOLLIN)
        self._is_set = False
        self._timer = -1  # timerfd_create(2); Python has it from 3.13 on
        self._remind_at = 0.0

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._epoll.fileno()

    def watch(self, fd: int, events: int = select.EPOLLIN) -> None:
        """Be readable while `fd` is. No effect once this is closed, perhaps by another thread."""
        try:
            self._epoll.register(fd, events)
        except (OSError, ValueError):
            if not self._epoll.closed:
                raise

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`, which is about to be closed."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def set(self) -> None:
        """Be readable until `clear`."""
        if not self._is_set and not self._epoll.closed:
            self._is_set = True
            os.eventfd_write(self._flag, 1)

    def remind(self) -> None:
        """Be readable once, within `REMINDER_SECONDS`."""
        if self._remind_at or self._epoll.closed:
            return
        if self._timer < 0:
            flags = os.O_CLOEXEC | os.O_NONBLOCK
            self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, flags)
            if self._timer < 0:
                return  # no descriptor is free: the next call tries again
            self._epoll.register(self._timer, select.EPOLLIN)
        self._remind_at = time.monotonic() + REMINDER_SECONDS
        _libc.timerfd_settime(self._timer, 0, _ONE_REMINDER, None)

    def clear(self) -> bool:
        """Undo `set` and an expired reminder; return whether `set` had been called."""
        if self._remind_at and time.monotonic() >= self._remind_at and not self._epoll.closed:
            with contextlib.suppress(BlockingIOError):
                os.read(self._timer, 8)
                self._remind_at = 0.0
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


class SchedulerReadiness(Readiness):
    """Readable when lookups may have changed: by the daemon's pipe, or a change of the session.

    Each attachment has a pipe of its own. It is not an eventfd, because the two ends of a pipe have
    their own flags: whatever a client does to its end, the daemon's write never blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._pipe = -1

    def replace_pipe(self, pipe: int) -> None:
        """Close the current pipe, take over this one and watch it; -1: none."""
        with self._lock:
            self._drop_pipe()
            self._pipe = pipe
            if pipe >= 0:
                self.watch(pipe)

    def set(self) -> None:
        """Wake up the event loop."""
        with self._lock:
            super().set()

    def test_and_clear(self) -> bool:
        """Return whether `set` was called, or the daemon's pipe was readable; clear both."""
        with self._lock:
            had_event = self.clear()
            while self._pipe >= 0:
                try:
                    data = os.read(self._pipe, 4096)
                except BlockingIOError:
                    break
                had_event = True
                if not data:  # end of file: the daemon has ended, or dropped this engine
                    self._drop_pipe()
            return had_event

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
