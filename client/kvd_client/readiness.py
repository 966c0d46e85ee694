"""One descriptor that becomes readable when something has happened, for event loops.

It is an epoll descriptor over what the package waits for itself. All of it is
level-triggered: it stays readable until the object's own call takes the news in.
"""

import contextlib
import os
import select
import threading


class Readiness:
    """A descriptor for an event loop. May be used by any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._flag = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._flag, select.EPOLLIN)

    def fileno(self) -> int:
        """The descriptor."""
        return self._epoll.fileno()

    def watch(self, fd: int, events: int = select.EPOLLIN) -> None:
        """Be readable while `fd` is."""
        self._epoll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`, which is about to be closed."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def set(self) -> None:
        """Be readable until `clear`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._flag, 1)

    def clear(self) -> None:
        """Take back what `set` said."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._flag)

    def close(self) -> None:
        """Close the descriptors."""
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._flag)

    def __repr__(self) -> str:
        return f"<Readiness {'closed' if self._epoll.closed else self.fileno()}>"


class ReadyNews:
    """What a scheduler's event loop waits for: the daemon's pipe, and what the session tells.

    The pipe comes with each attachment. May be used by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readiness: Readiness | None = None  # where somebody has asked for it
        self._told = False
        self._pipe = -1

    def fileno(self) -> int:
        """Readable until `take`, once something has happened."""
        with self._lock:
            if self._readiness is None:
                self._readiness = Readiness()
                if self._told:
                    self._readiness.set()
                self._watch()
            return self._readiness.fileno()

    def replace(self, pipe: int) -> None:
        """The engine was attached, with this pipe, or detached, with -1. Taken over."""
        with self._lock:
            self._drop_pipe()
            self._pipe = pipe
            self._watch()

    def tell(self) -> None:
        """Something has happened, and can be seen."""
        with self._lock:
            self._told = True
            if self._readiness is not None:
                self._readiness.set()

    def take(self) -> bool:
        """Whether anything has happened since the last call."""
        with self._lock:
            heard, self._told = self._told, False
            if self._readiness is not None:
                self._readiness.clear()
            while self._pipe >= 0:
                try:
                    told = os.read(self._pipe, 4096)
                except BlockingIOError:
                    break
                heard = True
                if not told:  # the daemon is gone
                    self._drop_pipe()
            return heard

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            self._drop_pipe()
            if self._readiness is not None:
                self._readiness.close()
                self._readiness = None

    def abandon(self) -> None:
        """In a forked child: close them without taking the parent's lock or telling its epoll."""
        self._lock = threading.Lock()
        if self._readiness is not None:
            self._readiness.close()
            self._readiness = None
        self._drop_pipe()

    def _watch(self) -> None:
        if self._readiness is not None and self._pipe >= 0:
            self._readiness.watch(self._pipe)

    def _drop_pipe(self) -> None:
        if self._pipe >= 0:
            if self._readiness is not None:
                self._readiness.unwatch(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def __repr__(self) -> str:
        return f"<ReadyNews {self._readiness!r}, pipe {self._pipe}>"
