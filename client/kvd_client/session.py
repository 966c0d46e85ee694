"""One process's part in an engine, and its session with the daemon: always there, connected or not.

Requests are made on the caller's thread. One thread, the keeper, handles
notices and connects again when the daemon is gone; it makes requests that no caller
waits for, and never keeps the process alive. A daemon that lets a deadline pass counts as gone: its
session is given up, which makes it drop what it granted, and a new one begins as soon as it
greets. Meanwhile a request costs microseconds and comes to nothing.

No lock is held by who waits, but for a condition's, which is free meanwhile: no call waits for
another thread's.
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
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from kvd_client.arguments import seconds, shown
from kvd_client.connection import BUSY_SECONDS, Connection, Notice, socket_path
from kvd_client.errors import AccessDenied, DaemonLost, Refused, UsageError, get_logger
from kvd_proto.messages import Error, ErrorCode, Kind, Message, Status, StatusReport
from kvd_proto.text import unprintable

FIRST_BACKOFF_SECONDS = 0.1
ABSENT_SECONDS = 0.5  # between two tries to connect at most: each costs microseconds
REFUSED_SECONDS = 2.0  # the same where a daemon refuses: that costs it a session
CLOSE_SECONDS = 2.0
REPORT_SECONDS = 1.0
LAST_REPORT_SECONDS = 0.25
GRACE_SECONDS = 0.1  # for replies that have arrived and were not taken in
MAX_ENGINE_NAME = 256

log = get_logger()


@dataclass(frozen=True, slots=True)
class AttachState:
    """How waiting ended: true where the engine is attached; else `why` is what is missing."""

    attached: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.attached

    def __str__(self) -> str:
        return self.why or "attached"


class Session:
    """What `Scheduler` and `Worker` have in common. A context manager that closes it.

    Args:
        runtime_dir: the daemon's.
        engine: the engine's name, the same for its scheduler and its workers.
        deadline: seconds that a request may take where it does not say otherwise.
    """

    _kind: ClassVar[Kind]

    def __init__(self, runtime_dir: str | os.PathLike[str], engine: str, deadline: float) -> None:
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
        self._changed = threading.Condition()  # of the connection, and of what it has brought
        self._connection: Connection | None = None
        self._unreachable = f"no daemon has answered in {self.runtime_dir} yet"  # why not connected
        self._denied = False  # this process may not connect
        self._warned = False  # the log's last line about the connection is a warning
        self._closed = ""
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events_lock = threading.Lock()  # a late `_wake` must not write to a closed number
        self._tried = threading.Event()
        self._keeper = threading.Thread(target=self._live, name=f"kvd-{self._kind}", daemon=True)

    def _start(self) -> None:
        """Start the keeper and wait for its first try, at most one deadline.

        Where no daemon is there the first try takes microseconds.
        """
        _SESSIONS.add(self)
        self._keeper.start()
        self._tried.wait(self.deadline)

    # --------------------------------------------------------------- callers

    @property
    def connected(self) -> bool:
        """Whether there is a daemon that answers."""
        return self._connection is not None

    @property
    def attached(self) -> bool:
        """Whether every rank is registered and has a lane, so that chunks can be found."""
        raise NotImplementedError

    def wait_attached(self, timeout: float) -> AttachState:
        """Wait until `attached`, at most `timeout` seconds; return whether it is, or why not.

        Returns at once where this process may not connect to the daemon.
        """
        self._check_open()
        patience = seconds("timeout", timeout)
        with self._changed:
            self._changed.wait_for(lambda: self.attached or self._closed or self._denied, patience)
            if self.attached and not self._closed:
                return AttachState(True)
        return AttachState(False, self._why_not_attached())

    def close(self) -> None:
        """End the session. The daemon sees it at once. May be called again."""
        if not self._closed:
            patience = min(self.deadline, LAST_REPORT_SECONDS)
            self._tell_rest(patience)
            self._tell_news(patience)
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
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self._closed or self._connection or "no daemon"
        return f"<{type(self).__name__} of {self.engine!r} at {self.runtime_dir}: {state}>"

    def _check_open(self) -> None:
        """Refuse to be used after the end."""
        if self._closed:
            raise UsageError(f"{self._closed}; make a new object")

    def _report(self) -> StatusReport | None:
        """Return the daemon's state; None without an answer."""
        self._check_open()
        reply = self._ask(Status(), self.deadline)
        return reply if isinstance(reply, StatusReport) else None

    def _ask(self, message: Message, patience: float, fds: Sequence[int] = ()) -> Message | None:
        """Ask the broker; the reply (its own type or `Error`), or None where there is none."""
        connection = self._connection
        if connection is None:
            return None
        try:
            reply = connection.exchange(message, time.monotonic() + patience, fds=fds)
        except DaemonLost as error:
            self._give_up(connection, str(error))
            return None
        if isinstance(reply, Error):
            log.log(_LEVELS.get(reply.code, logging.DEBUG), "%s: %s", reply.code, reply.text)
        return reply

    def _give_up(self, connection: Connection | None, why: str = "") -> None:
        """Use this connection no more; the keeper makes a new one."""
        with self._changed:
            if connection is None or self._connection is not connection:
                return
            self._connection = None
            if why:
                self._unreachable = f"the daemon in {self.runtime_dir} was given up: {why}"
            warns = bool(why and not self._closed)
            self._warned |= warns
            self._on_lost()
            self._changed.notify_all()
        if warns:
            log.warning("connection given up: %s; misses until a daemon answers", why)
        self._wake()

    def _wake(self) -> None:
        """Have the keeper look what there is to do."""
        with self._events_lock:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    def _why_not_attached(self) -> str:
        if self._closed:
            return "this session was closed meanwhile"
        if not self.connected:
            return self._unreachable
        reply = self._report()
        if reply is None:
            return f"the daemon in {self.runtime_dir} did not answer in time"
        try:
            return _missing(reply, self.engine)
        except (KeyError, TypeError):  # a daemon of another version
            return f"engine {self.engine!r} is not complete yet"

    # ---------------------------------------------------------------- keeper

    def _on_open(self) -> None:
        """A connection is there."""

    def _work(self) -> bool:
        """Ask for what is wanted of the daemon. False: connect again later."""
        return True

    def _on_notice(self, notice: Notice) -> None:
        """Handle a notice. Descriptors that are not taken are closed."""

    def _news(self) -> Message | None:
        """Return what to tell the daemon, if anything; asked once a second and before the end."""

    def _tell_rest(self, patience: float) -> None:
        """Before the end, tell the daemon what it has not been told yet, and wait until it knows.

        patience: seconds to wait at most.
        """

    def _tend(self, connection: Connection) -> None:
        """Take in what has arrived, whenever the keeper wakes up."""
        connection.take_in()

    def _on_lost(self) -> None:
        """The connection is gone. Called under `_changed`, by any thread."""

    def _on_fork(self) -> None:
        """This process is a fork: close what it inherited. No lock may be taken."""

    def _live(self) -> None:
        delay = 0.0
        try:
            while not self._closed:
                began = time.monotonic()
                longest = self._try()
                self._tried.set()
                delay = min(max(2 * delay, FIRST_BACKOFF_SECONDS), longest)
                # A try that took long, such as a registration that waited for a lane, was a pause.
                self._pause(max(0.0, began + delay - time.monotonic()))
        finally:
            self._free()  # here, since `close` does not wait for a busy keeper for ever

    def _try(self) -> float:
        """Connect and serve the connection to its end; seconds to wait at most until the next."""
        try:
            connection = Connection(
                self.runtime_dir, self._kind, self.engine, self._stop, self._wake
            )
        except (DaemonLost, OSError) as error:
            self._on_unreachable(error)
            return REFUSED_SECONDS if isinstance(error, Refused) else ABSENT_SECONDS
        self._denied = False
        self._connection = connection
        connected_at = time.monotonic()
        # Where its loss is in the log, its return is.
        log.log(logging.WARNING if self._warned else logging.INFO, "connected: %r", connection)
        self._warned = False
        served, why = False, ""
        try:
            self._on_open()
            served = self._work()
            self._tried.set()
            if served:
                self._watch(connection)
        except DaemonLost as error:
            why = str(error)
            served = served and not isinstance(error, Refused)
        except Exception:
            log.exception("the keeper of %r failed; it goes on", self)
            served = False
        self._give_up(connection, why)
        with self._changed:
            self._on_lost()  # also what this thread did after a caller had given it up
        connection.close()
        lasted = time.monotonic() - connected_at >= REPORT_SECONDS
        return 0.0 if served and lasted else REFUSED_SECONDS

    def _on_unreachable(self, error: DaemonLost | OSError) -> None:
        """Note why there is no connection. A refusal is a warning, an absent daemon is none."""
        denied, refused = isinstance(error, AccessDenied), isinstance(error, Refused)
        if denied:
            why = str(error)
        elif refused:
            why = f"the daemon in {self.runtime_dir} refuses: {error}"
        else:
            cause = error.strerror if isinstance(error, OSError) else None
            why = (
                f"no daemon answers in {self.runtime_dir} ({cause or error});"
                " is `kvd serve` running there?"
            )
        with self._changed:
            known = self._unreachable == why
            self._unreachable, self._denied = why, denied
            self._changed.notify_all()
        if not known:
            self._warned |= denied or refused
            level = logging.WARNING if denied or refused else logging.DEBUG
            log.log(level, "not connected, every lookup misses: %s", why)

    def _watch(self, connection: Connection) -> None:
        """Handle what arrives; return when the connection is to be given up.

        While callers are busy with the connection they take in what arrives, notices
        included. The keeper polls for the hang-up alone then, and looks again after
        `BUSY_SECONDS`: a reply costs the engine's thread no switch to this one.
        """
        fd = connection.fileno()
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        told = time.monotonic()
        while self._work():
            events = 0 if connection.busy else select.POLLIN
            poller.register(fd, events | (select.POLLOUT * connection.wants_write))
            ready = dict(poller.poll(self._until_due(connection) * 1000))
            if self._closed or self._connection is not connection:
                return
            if self._woken in ready:
                os.eventfd_read(self._woken)
            if not connection.awaited or ready.get(fd, 0) & select.POLLHUP:
                self._tend(connection)
            self._handle_notices(connection)
            if connection.failed:
                raise connection.loss
            if self._is_overdue(connection):
                raise DaemonLost("no answer within the deadline")
            if time.monotonic() >= told + REPORT_SECONDS:
                self._tell_news(self.deadline)
                told = time.monotonic()

    def _handle_notices(self, connection: Connection) -> None:
        """Handle all notices that were taken in."""
        while (notice := connection.receive()) is not None:
            try:
                self._on_notice(notice)
            finally:
                notice.close()

    def _until_due(self, connection: Connection) -> float:
        """Seconds until the keeper has to look after the connection."""
        if connection.has_notices:
            return 0.0
        longest = BUSY_SECONDS if connection.busy else REPORT_SECONDS
        oldest = connection.oldest
        if oldest is None:
            return longest
        return min(longest, max(0.0, oldest + self.deadline - time.monotonic()))

    def _is_overdue(self, connection: Connection) -> bool:
        """Whether a posted request's deadline is over, and its answer is not here.

        This process may have been stopped meanwhile: what has come by now counts.
        """
        end = time.monotonic() + GRACE_SECONDS
        while connection.is_overdue(self.deadline):
            left = end - time.monotonic()
            if left <= 0 or connection.wait_readable(left):
                return True
            connection.take_in()
        return False

    def _tell_news(self, patience: float) -> None:
        if (message := self._news()) is not None:
            self._ask(message, patience)

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        poller.poll(seconds * 1000)

    # ------------------------------------------------------------------- end

    def _abandon(self) -> None:
        """In a forked child: the session is the parent's, its descriptors are closed here."""
        self._closed = "this session belongs to the process that was forked"
        self._events_lock = threading.Lock()
        self._changed = threading.Condition()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        self._close_events()
        self._on_fork()

    def _free(self) -> None:
        with self._events_lock:
            self._close_events()

    def _close_events(self) -> None:
        if self._stop >= 0:  # a fork may meet a session that was freed just now
            os.close(self._stop)
            os.close(self._woken)
            self._stop = self._woken = -1


def _directory(path: object) -> Path:
    if isinstance(path, (str, os.PathLike)):
        with contextlib.suppress(TypeError, ValueError):
            found = Path(path)
            if b"\0" not in os.fsencode(found):
                return found
    raise UsageError(f"runtime_dir={shown(path)}: the path of a directory is needed, as text")


def _missing(report: StatusReport, name: str) -> str:
    engine = next((e for e in report.status["engines"] if e["name"] == name), None)
    if engine is None or not engine["world_size"]:
        return f"no rank of engine {name!r} is registered; do its workers use this name?"
    if engine["missing_ranks"]:
        ranks = ", ".join(map(str, engine["missing_ranks"]))
        return f"engine {name!r} lacks rank {ranks} of {engine['world_size']}"
    devices = {session["device"] for session in engine["sessions"]}
    down = [
        f"lane {lane['device']} is {lane['state']}"
        for lane in report.status["lanes"]
        if lane["device"] in devices and not lane["up"]
    ]
    return "; ".join(down) or f"engine {name!r} is being attached; wait longer"


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
        session._abandon()  # noqa: SLF001  # its own module's
    _SESSIONS.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
