"""A process's session with the daemon, which outlives the daemon's restarts.

Requests are made on the caller's thread. The keeper, a daemon thread, handles notices, makes the
requests that no caller waits for, and connects again when the daemon is gone. A daemon that misses
a deadline counts as gone: the connection is closed, by which the daemon drops what it granted, and
the keeper connects again as soon as the daemon answers. Until then requests return at once, without
a reply.

No lock is held while waiting, except a condition's, which waiting releases.
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

from kvd_client.connection import BUSY_SECONDS, Connection, Notice, socket_path
from kvd_client.errors import (
    AccessDenied,
    DaemonLost,
    Refused,
    UsageError,
    check_seconds,
    get_logger,
    shown,
)
from kvd_proto.messages import Error, ErrorCode, Kind, Message, Status, StatusReport
from kvd_proto.text import unprintable

MIN_BACKOFF_SECONDS = 0.1
ABSENT_SECONDS = 0.5  # longest pause between two tries to connect; each costs microseconds
REFUSED_SECONDS = 2.0  # the same if a daemon refuses: that costs it a session
CLOSE_SECONDS = 2.0
REPORT_SECONDS = 1.0
LAST_REPORT_SECONDS = 0.25
GRACE_SECONDS = 0.1  # for replies that have arrived and were not received
MAX_ENGINE_NAME = 256

log = get_logger()


@dataclass(frozen=True, slots=True)
class AttachState:
    """How waiting ended: true if the engine is attached; else `why` says what is missing."""

    attached: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.attached

    def __str__(self) -> str:
        return self.why or "attached"


class ClientSession:
    """What `Scheduler` and `Worker` have in common. A context manager that closes it.

    Args:
        runtime_dir: the daemon's.
        engine: the engine's name, the same for its scheduler and its workers.
        deadline: seconds that a request may take, unless it says otherwise.
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
        self.deadline = check_seconds("deadline", deadline, 3600.0, positive=True)
        self._changed = threading.Condition()  # the connection, or a state that messages change
        self._connection: Connection | None = None
        self._why_unreachable = (
            f"no daemon has answered in {self.runtime_dir} yet"  # why not connected
        )
        self._is_access_denied = False  # this process may not connect
        self._has_warned = False  # the latest log line about the connection is a warning
        self._closed_reason = ""  # why calls are refused; empty while open
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fds_lock = threading.Lock()  # a late `_wake` must not write to a closed descriptor
        self._has_tried = threading.Event()
        name = f"kvd-{self._kind}"
        self._keeper = threading.Thread(target=self._run_keeper, name=name, daemon=True)

    def _start(self) -> None:
        """Start the keeper and wait for its first try to connect, at most one deadline.

        Without a daemon the first try takes microseconds.
        """
        _SESSIONS.add(self)
        self._keeper.start()
        self._has_tried.wait(self.deadline)

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

        Returns at once if this process may not connect to the daemon.
        """
        self._check_open()
        timeout_s = check_seconds("timeout", timeout)
        with self._changed:
            self._changed.wait_for(
                lambda: self.attached or self._closed_reason or self._is_access_denied, timeout_s
            )
            if self.attached and not self._closed_reason:
                return AttachState(True)
        return AttachState(False, self._why_not_attached())

    def close(self) -> None:
        """End the session. The daemon sees it at once. May be called again."""
        if not self._closed_reason:
            timeout = min(self.deadline, LAST_REPORT_SECONDS)
            self._flush(timeout)
            self._send_report(timeout)
        with self._fds_lock:
            if self._closed_reason:
                return
            self._closed_reason = "this session is closed"
            os.eventfd_write(self._stop_fd, 1)
        _SESSIONS.discard(self)
        if self._keeper is not threading.current_thread() and self._keeper.is_alive():
            self._keeper.join(CLOSE_SECONDS)
        if not self._keeper.is_alive():  # it was never started, or has closed them itself
            self._close_fds()
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        """Raise `UsageError` after `close`."""
        if self._closed_reason:
            raise UsageError(f"{self._closed_reason}; make a new object")

    def _request_status(self) -> StatusReport | None:
        """Return the daemon's state; None without an answer."""
        self._check_open()
        reply = self._request(Status(), self.deadline)
        return reply if isinstance(reply, StatusReport) else None

    def _request(self, message: Message, timeout: float, fds: Sequence[int] = ()) -> Message | None:
        """Send a request to the broker; return the reply (of its type, or `Error`).

        None: there is no connection, or it was given up without a reply.
        """
        connection = self._connection
        if connection is None:
            return None
        try:
            reply = connection.exchange(message, time.monotonic() + timeout, fds=fds)
        except DaemonLost as error:
            self._give_up(connection, str(error))
            return None
        if isinstance(reply, Error):
            log.log(_LOG_LEVELS.get(reply.code, logging.DEBUG), "%s: %s", reply.code, reply.text)
        return reply

    def _give_up(self, connection: Connection | None, reason: str = "") -> None:
        """Stop using this connection; the keeper makes a new one."""
        with self._changed:
            if connection is None or self._connection is not connection:
                return
            self._connection = None
            if reason:
                self._why_unreachable = f"the daemon in {self.runtime_dir} was given up: {reason}"
            warns = bool(reason and not self._closed_reason)
            self._has_warned |= warns
            self._on_disconnected()
            self._changed.notify_all()
        if warns:
            log.warning("connection given up: %s; misses until a daemon answers", reason)
        self._wake()

    def _wake(self) -> None:
        """Make the keeper check the connection and send its requests."""
        with self._fds_lock:
            if not self._closed_reason:
                os.eventfd_write(self._wake_fd, 1)

    def _why_not_attached(self) -> str:
        if self._closed_reason:
            return "this session was closed meanwhile"
        if not self.connected:
            return self._why_unreachable
        reply = self._request_status()
        if reply is None:
            return f"the daemon in {self.runtime_dir} did not answer in time"
        try:
            return _why_incomplete(reply, self.engine)
        except (KeyError, TypeError):  # a daemon of another version
            return f"engine {self.engine!r} is not complete yet"

    # ----------------------------------------------------- hooks for the keeper

    def _on_connected(self) -> None:
        """Handle a new connection."""

    def _send_requests(self) -> bool:
        """Make the requests that no caller waits for; return False to connect again later."""
        return True

    def _on_notice(self, notice: Notice) -> None:
        """Handle a notice. Descriptors that are not taken are closed."""

    def _make_report(self) -> Message | None:
        """Return what to report once a second and before the end; None: nothing new."""

    def _flush(self, timeout: float) -> None:
        """Before the end, send what is left, and wait up to `timeout` seconds for the answers."""

    def _receive(self, connection: Connection) -> None:
        """Receive what has arrived, whenever the keeper wakes up."""
        connection.receive_all()

    def _on_disconnected(self) -> None:
        """Handle the loss of the connection. Called under `_changed`, by any thread."""

    def _on_fork(self) -> None:
        """Close what a forked child inherited. It must take no lock."""

    # ---------------------------------------------------------------- keeper

    def _run_keeper(self) -> None:
        delay = 0.0
        try:
            while not self._closed_reason:
                began = time.monotonic()
                max_delay = self._connect_and_serve()
                self._has_tried.set()
                delay = min(max(2 * delay, MIN_BACKOFF_SECONDS), max_delay)
                # A try that took long, such as a registration that waited for a lane, was a pause.
                self._pause(max(0.0, began + delay - time.monotonic()))
        finally:
            self._close_fds()  # here, since `close` does not wait for a busy keeper for ever

    def _connect_and_serve(self) -> float:
        """Connect and serve the connection to its end; return the longest pause before the next."""
        try:
            connection = Connection(
                self.runtime_dir, self._kind, self.engine, self._stop_fd, self._wake
            )
        except (DaemonLost, OSError) as error:
            self._on_unreachable(error)
            return REFUSED_SECONDS if isinstance(error, Refused) else ABSENT_SECONDS
        self._is_access_denied = False
        self._connection = connection
        connected_at = time.monotonic()
        # If a warning reported the loss of the connection, a warning reports its return.
        level = logging.WARNING if self._has_warned else logging.INFO
        log.log(level, "connected: %s, pid %d", connection.daemon, connection.pid)
        self._has_warned = False
        was_served, reason = False, ""
        try:
            self._on_connected()
            was_served = self._send_requests()
            self._has_tried.set()
            if was_served:
                self._serve(connection)
        except DaemonLost as error:
            reason = str(error)
            was_served = was_served and not isinstance(error, Refused)
        except Exception:
            text = "the %s session of engine %s failed; it connects again"
            log.exception(text, self._kind, self.engine)
            was_served = False
        self._give_up(connection, reason)
        with self._changed:
            self._on_disconnected()  # again: this thread may have attached after a caller gave up
        connection.close()
        has_lasted = time.monotonic() - connected_at >= REPORT_SECONDS
        return 0.0 if was_served and has_lasted else REFUSED_SECONDS

    def _on_unreachable(self, error: DaemonLost | OSError) -> None:
        """Record why there is no connection. Log a refusal as a warning, an absent daemon not."""
        is_denied, is_refused = isinstance(error, AccessDenied), isinstance(error, Refused)
        if is_denied:
            reason = str(error)
        elif is_refused:
            reason = f"the daemon in {self.runtime_dir} refuses: {error}"
        else:
            cause = error.strerror if isinstance(error, OSError) else None
            reason = (
                f"no daemon answers in {self.runtime_dir} ({cause or error});"
                " is `kvd serve` running there?"
            )
        with self._changed:
            is_known = self._why_unreachable == reason
            self._why_unreachable, self._is_access_denied = reason, is_denied
            self._changed.notify_all()
        if not is_known:
            self._has_warned |= is_denied or is_refused
            level = logging.WARNING if is_denied or is_refused else logging.DEBUG
            log.log(level, "not connected, every lookup misses: %s", reason)

    def _serve(self, connection: Connection) -> None:
        """Handle what arrives; return when the connection is to be given up.

        While callers use the connection, they receive what arrives, notices included. The keeper
        then polls for the hang-up alone, and again after `BUSY_SECONDS`, so that a reply does not
        switch the engine's thread to this one.
        """
        fd = connection.fileno()
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.register(self._stop_fd, select.POLLIN)
        reported_at = time.monotonic()
        while self._send_requests():
            events = 0 if connection.is_busy else select.POLLIN
            write_event = select.POLLOUT if connection.wants_write else 0
            poller.register(fd, events | write_event)
            ready = dict(poller.poll(self._poll_seconds(connection) * 1000))
            if self._closed_reason or self._connection is not connection:
                return
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if not connection.is_awaited or ready.get(fd, 0) & select.POLLHUP:
                self._receive(connection)
            self._handle_notices(connection)
            if connection.failure:
                raise connection.error
            if self._is_overdue(connection):
                raise DaemonLost("no answer within the deadline")
            if time.monotonic() >= reported_at + REPORT_SECONDS:
                self._send_report(self.deadline)
                reported_at = time.monotonic()

    def _handle_notices(self, connection: Connection) -> None:
        """Handle all notices that were received."""
        while (notice := connection.next_notice()) is not None:
            try:
                self._on_notice(notice)
            finally:
                notice.close()

    def _poll_seconds(self, connection: Connection) -> float:
        """Return how long the keeper may poll before it must check the connection."""
        if connection.has_notices:
            return 0.0
        timeout = BUSY_SECONDS if connection.is_busy else REPORT_SECONDS
        posted_at = connection.oldest_posted_at
        if posted_at is None:
            return timeout
        return min(timeout, max(0.0, posted_at + self.deadline - time.monotonic()))

    def _is_overdue(self, connection: Connection) -> bool:
        """Return whether a posted request has no answer within its deadline.

        This process may have been stopped meanwhile, so answers that have arrived by now count.
        """
        end = time.monotonic() + GRACE_SECONDS
        while connection.is_overdue(self.deadline):
            left_s = end - time.monotonic()
            if left_s <= 0 or connection.wait_or_fail(left_s):
                return True
            connection.receive_all()
        return False

    def _send_report(self, timeout: float) -> None:
        if (message := self._make_report()) is not None:
            self._request(message, timeout)

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._stop_fd, select.POLLIN)
        poller.poll(seconds * 1000)

    # ------------------------------------------------------------------- end

    def _abandon(self) -> None:
        """In a forked child: close the descriptors; the session is the parent's."""
        self._closed_reason = "this session belongs to the process that was forked"
        self._fds_lock = threading.Lock()
        self._changed = threading.Condition()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        self._close_fds_locked()
        self._on_fork()

    def _close_fds(self) -> None:
        with self._fds_lock:
            self._close_fds_locked()

    def _close_fds_locked(self) -> None:
        if self._stop_fd >= 0:  # a fork may happen just after they were closed
            os.close(self._stop_fd)
            os.close(self._wake_fd)
            self._stop_fd = self._wake_fd = -1


def _directory(path: object) -> Path:
    if isinstance(path, (str, os.PathLike)):
        with contextlib.suppress(TypeError, ValueError):
            directory = Path(path)
            if b"\0" not in os.fsencode(directory):
                return directory
    raise UsageError(f"runtime_dir={shown(path)}: the path of a directory is needed, as text")


def _why_incomplete(report: StatusReport, name: str) -> str:
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


_LOG_LEVELS = {
    ErrorCode.BAD_MESSAGE: logging.ERROR,
    ErrorCode.INTERNAL: logging.ERROR,
    ErrorCode.BAD_STATE: logging.WARNING,
    ErrorCode.LIMIT: logging.WARNING,
}
_SESSIONS: "weakref.WeakSet[ClientSession]" = weakref.WeakSet()


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
