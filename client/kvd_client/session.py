"""One session with the daemon: always there, connected or not.

Requests are made on the caller's thread. One thread, the keeper, watches the
control socket and connects again when the daemon is gone; it makes no caller's requests
and never keeps the process alive. While there is no daemon, or one that has
let a deadline pass and has not answered a PING since, a request costs
microseconds and comes to nothing.
"""

import atexit
import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import zmq

from kvd_client.arguments import seconds, shown
from kvd_client.connection import Connection, Notice, greeting_hello, socket_path
from kvd_client.errors import DaemonLost, DaemonSilent, Refused, UsageError
from kvd_proto.messages import Error, ErrorCode, Kind, Message
from kvd_proto.printable import unprintable

FIRST_BACKOFF_SECONDS = 0.1
ABSENT_SECONDS = 0.5  # between two tries to connect at most: each costs microseconds
REFUSED_SECONDS = 2.0  # the same where a daemon refuses: that costs it a session
PROBE_SECONDS = 0.02
CLOSE_SECONDS = 2.0
REPORT_SECONDS = 1.0
LAST_REPORT_SECONDS = 0.25
MAX_ENGINE_NAME = 256

log = logging.getLogger("kvd_client")


class Handler:
    """The owner of a session; all but `on_fork` is called by the keeper's thread."""

    def on_open(self) -> bool:
        """A connection is there. False: give it up and connect again later."""
        return self.on_wake()

    def on_wake(self) -> bool:
        """`Session.wake` was called. False as for `on_open`."""
        return True

    def on_notice(self, notice: Notice) -> None:
        """Handle a notice of the control socket. Descriptors that are not taken are closed."""

    def on_silent(self, silent: bool) -> None:
        """A deadline has passed, or the daemon answers again."""

    def undo(self, request: Message, reply: Message) -> Message | None:
        """Return the request that takes back what was granted after nobody waited any more."""
        del request, reply
        return None

    def news(self) -> Message | None:
        """Return what to tell the daemon, if anything; asked once a second and before the end."""

    def on_lost(self) -> None:
        """The connection is gone."""

    def on_fork(self) -> None:
        """This process is a fork: close what it inherited. No lock may be taken."""


class Session:
    """A session that reconnects by itself.

    Args:
        runtime_dir: the daemon's.
        kind: "scheduler" or "worker".
        engine: the engine's name, the same for its scheduler and its workers.
        handler: see `Handler`.
        deadline: seconds that a request may take where it does not say otherwise.

    Raises:
        UsageError: an invalid argument.
    """

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str],
        kind: Kind,
        engine: str,
        handler: Handler,
        *,
        deadline: float = 1.0,
    ) -> None:
        if (
            not isinstance(engine, str)
            or not 1 <= len(engine) <= MAX_ENGINE_NAME
            or unprintable(engine)
        ):
            raise UsageError(
                f"engine={shown(engine)}: a name of 1 to {MAX_ENGINE_NAME} printable characters is"
                " needed, the same for the scheduler and all workers of one engine"
            )
        self.runtime_dir = _directory(runtime_dir)
        socket_path(self.runtime_dir, "broker.sock")
        self.engine = engine
        self.deadline = seconds("deadline", deadline, 3600.0, positive=True)
        self._hello = greeting_hello(kind, engine)
        self._handler = handler
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._silent = False
        self.refusal = ""  # why the daemon refused the last connection
        self._closed = ""
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events_lock = threading.Lock()  # a late `wake` must not write to a closed number
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tried = threading.Event()
        self._keeper = threading.Thread(target=self._live, name=f"kvd-{kind}", daemon=True)

    def start(self) -> None:
        """Start the keeper and wait for its first try, at most one deadline.

        Where no daemon is there the first try takes microseconds.
        """
        _SESSIONS.add(self)
        self._keeper.start()
        self._tried.wait(self.deadline)

    # --------------------------------------------------------------- callers

    @property
    def connected(self) -> bool:
        """Whether a request has a chance now."""
        return self._connection is not None and not self._silent

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a fork."""
        return bool(self._closed)

    @property
    def identity(self) -> tuple[bytes, bytes] | None:
        """Boot id of the daemon and this session's token, or None while there is no daemon."""
        connection = self._connection
        return None if connection is None else (connection.boot_id, connection.token)

    def check_open(self) -> None:
        """Refuse to be used after the end.

        Raises:
            UsageError: closed, or in a forked child.
        """
        if self._closed:
            raise UsageError(f"{self._closed}; make a new object")

    def request(
        self, message: Message, seconds: float | None = None, fds: Sequence[int] = ()
    ) -> Message | None:
        """Ask the broker; the reply (its own type or `Error`), or None where there is none.

        Args:
            message: the request.
            seconds: that it may take; None: the session's deadline.
            fds: descriptors to send with it.

        Raises:
            UsageError: the session is closed.
        """
        self.check_open()
        return self._ask(message, self.deadline if seconds is None else seconds, fds=fds)

    def settle(self, message: Message) -> Message | None:
        """As `request`; what cannot be sent now is sent when this daemon answers again.

        Raises:
            UsageError: the session is closed.
        """
        self.check_open()
        return self._ask(message, self.deadline, owed=True)

    def _ask(
        self, message: Message, seconds: float, *, owed: bool = False, fds: Sequence[int] = ()
    ) -> Message | None:
        connection = self._connection
        if connection is None:
            return None
        end = time.monotonic() + seconds
        locked = not self._silent and self._lock.acquire(timeout=max(0.0, seconds))
        try:
            if not locked or connection is not self._connection or self._silent:
                if owed:  # to this connection alone: with it the daemon forgets the session
                    connection.owed.append(message)
                    self.wake()
                return None
            reply = connection.exchange(message, end, fds=fds)
        except DaemonSilent as error:
            log.warning("%s within its deadline; treated as a miss until the daemon answers", error)
            self._silent = True
            self._handler.on_silent(silent=True)
            self.wake()
            return None
        except DaemonLost as error:
            self._drop(connection, str(error))
            return None
        finally:
            if locked:
                self._lock.release()
        if isinstance(reply, Error):
            if reply.code in (ErrorCode.STALE_BOOT, ErrorCode.BAD_SESSION):
                self._drop(connection, reply.text)
                return None
            log.log(_LEVELS.get(reply.code, logging.DEBUG), "%s: %s", reply.code, reply.text)
        return reply

    def reset(self, why: str) -> None:
        """Give the present connection up; the keeper makes a new one."""
        connection = self._connection
        if connection is not None:
            self._drop(connection, why)

    def wake(self) -> None:
        """Have the keeper call `Handler.on_wake`."""
        if not self._closed:
            with self._events_lock:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the session. The daemon sees it at once. May be called again."""
        if not self._closed:
            self._tell_news(min(self.deadline, LAST_REPORT_SECONDS))
        with self._events_lock:
            if self._closed:
                return
            self._closed = "this session is closed"
            os.eventfd_write(self._stop, 1)
        _SESSIONS.discard(self)
        if self._keeper is not threading.current_thread() and self._keeper.is_alive():
            self._keeper.join(CLOSE_SECONDS)
        if not self._keeper.is_alive():  # it was never started, or has done this itself
            self._free()

    # ---------------------------------------------------------------- keeper

    def _live(self) -> None:
        try:
            self._keep()
        finally:
            self._free()  # here, since `close` does not wait for a busy keeper for ever

    def _keep(self) -> None:
        delay = 0.0
        while not self._closed:
            connection = None
            good = False
            longest = ABSENT_SECONDS
            began = time.monotonic()
            try:
                connection = Connection(
                    self.context, self.runtime_dir, self._hello, self._stop, max(self.deadline, 1.0)
                )
                self._silent = False
                self.refusal = ""
                self._connection = connection
                longest = REFUSED_SECONDS
                log.info("connected: %r", connection)
                good = self._handler.on_open()
                self._tried.set()
                if good:
                    self._watch(connection)
            except Refused as error:
                longest = REFUSED_SECONDS
                if str(error) != self.refusal:
                    self.refusal = str(error)
                    log.warning("connection refused at %s: %s", self.runtime_dir, error)
            except (DaemonLost, DaemonSilent, OSError) as error:
                if connection is None:
                    log.debug("no daemon at %s: %s", self.runtime_dir, error)
                elif not self._closed:
                    log.warning("the daemon is gone (%s); misses until one is back", error)
            except Exception:
                log.exception("the keeper of %r failed; it goes on", self)
            self._tried.set()
            if connection is not None:
                self._leave(connection)
            delay = 0.0 if good else min(max(2 * delay, FIRST_BACKOFF_SECONDS), longest)
            # A try that took long, such as a registration that waited for a lane, was a pause.
            self._pause(max(0.0, began + delay - time.monotonic()))

    def _watch(self, connection: Connection) -> None:
        """Serve the control socket; return when the connection is to be given up."""
        poller = select.poll()
        for fd in (connection.fileno(), self._wake, self._stop):
            poller.register(fd, select.POLLIN)
        told = time.monotonic()
        while True:
            patience = PROBE_SECONDS if self._silent else REPORT_SECONDS
            ready = {fd for fd, _ in poller.poll(patience * 1000)}
            if self._closed or connection.doomed:
                return
            if time.monotonic() >= told + REPORT_SECONDS:
                self._tell_news(self.deadline)
                told = time.monotonic()
            if self._wake in ready:
                os.eventfd_read(self._wake)
                if not self._handler.on_wake():
                    return
            if connection.fileno() in ready:
                while (notice := connection.receive()) is not None:
                    try:
                        self._handler.on_notice(notice)
                    finally:
                        notice.close()
            if self._silent and self._answers(connection):
                self._silent = False
                self._handler.on_silent(silent=False)
                log.info("the daemon answers again")
            if not self._silent:
                for _ in range(len(connection.owed)):
                    self._ask(connection.owed.popleft(), self.deadline, owed=True)

    def _tell_news(self, seconds: float) -> None:
        if (message := self._handler.news()) is not None:
            self._ask(message, seconds)

    def _answers(self, connection: Connection) -> bool:
        if not self._lock.acquire(timeout=PROBE_SECONDS):
            return False
        try:
            late = connection.ping()
        finally:
            self._lock.release()
        if late is None:
            return False
        undone = (self._handler.undo(request, reply) for request, reply in late)
        connection.owed.extendleft(message for message in undone if message is not None)
        return True

    def _drop(self, connection: Connection, why: str) -> None:
        connection.doomed = True
        if self._connection is connection:
            self._connection = None
            log.info("connection given up: %s", why)
        self.wake()

    def _leave(self, connection: Connection) -> None:
        self._connection = None
        self._handler.on_lost()
        with self._lock:  # a pending request has ended: its daemon is gone, or the stop is set
            connection.close()

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        poller.poll(seconds * 1000)

    def abandon(self) -> None:
        """In a forked child: the session is the parent's, its descriptors are closed here."""
        self._closed = "this session belongs to the process that was forked"
        self._lock = threading.Lock()
        self._events_lock = threading.Lock()
        connection, self._connection = self._connection, None
        if connection is not None:
            # Closes the control socket's copy; ZeroMQ itself leaves foreign sockets alone.
            connection.close()
        self._close_events()
        self._handler.on_fork()

    def _free(self) -> None:
        self.context.destroy(linger=0)
        with self._events_lock:
            self._close_events()

    def _close_events(self) -> None:
        if self._stop >= 0:  # a fork may meet a session that was freed just now
            os.close(self._stop)
            os.close(self._wake)
            self._stop = self._wake = -1

    def __repr__(self) -> str:
        connection = self._connection
        state = self._closed or ("silent" if self._silent else connection) or "no daemon"
        return f"<Session {self.engine!r} at {self.runtime_dir}: {state}>"


def _directory(path: object) -> Path:
    if isinstance(path, (str, os.PathLike)):
        with contextlib.suppress(TypeError, ValueError):
            found = Path(path)
            if b"\0" not in os.fsencode(found):
                return found
    raise UsageError(f"runtime_dir={shown(path)}: the path of a directory is needed, as text")


_LEVELS = {
    ErrorCode.BAD_MESSAGE: logging.ERROR,
    ErrorCode.INTERNAL: logging.ERROR,
    ErrorCode.BAD_STATE: logging.WARNING,
    ErrorCode.LIMIT: logging.WARNING,
}
_SESSIONS: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _close_all() -> None:
    for session in list(_SESSIONS):
        with contextlib.suppress(Exception):
            session.close()


def _abandon_all() -> None:
    for session in list(_SESSIONS):
        session.abandon()
    _SESSIONS.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
