"""Messages to the service manager over ``$NOTIFY_SOCKET``; see sd_notify(3).

The watchdog is fed only at the end of a turn of the loop, so a stalled loop is noticed. A manager
that does not read never blocks the loop: messages that cannot be sent wait for the next turn. If no
manager listens, they are dropped.

READY means *serving*: requests are answered and engines may connect. It does not wait for the pool:
allocating a large one takes minutes, ``cpu_bytes = "auto"`` has none before the first engine, and
an engine whose unit is ordered after kvd must start meanwhile. To wait for the pool use ``kvd
status --wait`` or ``/readyz``.
"""

import logging
import os
import socket
from collections import deque
from collections.abc import Mapping

from kvd.broker.state import BrokerState
from kvd.broker.status_report import readiness_checks
from kvd.errors import ConfigError

log = logging.getLogger("kvd.daemon")
_MAX_UNSENT = 16
MAX_BEAT_SECONDS = 5.0
SHUTDOWN_SECONDS = 30.0  # after the lanes have ended: tiers, the pool's files
_TEXT_SECONDS = 1.0
_MAX_TEXT_CHARS = 400


class Notifier:
    """The connection to the service manager; does nothing without one.

    While the pool is being allocated or pinned, each beat with progress extends the start timeout,
    so that a start job that waits for the pool is not ended. Without progress it is not extended.

    Args:
        address: a path, or ``@`` and a name in the abstract namespace; empty for no manager.
        watchdog_seconds: the manager's watchdog timeout; None if it has no watchdog.
    """

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        self.address = address
        self.watchdog = watchdog_seconds is not None
        self.period = min(watchdog_seconds or 2 * MAX_BEAT_SECONDS, 3600.0) / 2
        self._ready_sent = False
        self._next_beat = 0.0
        self._next_text = 0.0
        self._text = ""
        self._progress: float | None = None
        self._unsent: deque[bytes] = deque(maxlen=_MAX_UNSENT)
        self._delivered = True
        self._reloading = False
        self._socket: socket.socket | None = None
        if address[:1] in {"/", "@"}:
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._socket = socket.socket(socket.AF_UNIX, kind)
        elif address:
            log.warning("NOTIFY_SOCKET=%s is neither a path nor @name: not used", address)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Notifier":
        """Return a notifier by the variables of sd_notify(3) and sd_watchdog_enabled(3).

        A watchdog for another pid is ignored.

        Raises:
            ConfigError: WATCHDOG_USEC is not a positive number.
        """
        address = environ.get("NOTIFY_SOCKET", "")
        usec = environ.get("WATCHDOG_USEC", "")
        pid = environ.get("WATCHDOG_PID", "")
        watchdog = None
        if usec and pid in {"", str(os.getpid())}:
            if not usec.isdecimal() or int(usec) == 0:
                raise ConfigError(
                    f"WATCHDOG_USEC={usec}: not a number of microseconds; unset it, or set"
                    " WatchdogSec= in the unit"
                )
            watchdog = int(usec) / 1_000_000
        return cls(address, watchdog)

    def turn(self, now: float, state: BrokerState, *, reloading: bool) -> None:
        """Send what is due at the end of a turn; `reloading`: the settings are being read again."""
        if self._socket is None:
            return
        if reloading and not self._reloading:
            self._queue(["RELOADING=1", f"MONOTONIC_USEC={_usec(now)}"])
        elif self._reloading and not reloading:
            self._ready_sent = False
        self._reloading = reloading
        if self.is_due(now) and not self._unsent:
            pool_bytes = state.allocated_bytes + state.pinned_bytes
            progress = None if state.pool_usable else float(pool_bytes)
            self._queue(self.take_lines(now, _state_text(state, now), progress))
        self._flush()

    def is_due(self, now: float) -> bool:
        """Return whether a message may be due at `now` (monotonic seconds)."""
        return not self._ready_sent or now >= min(self._next_beat, self._next_text)

    def take_lines(self, now: float, text: str, progress: float | None) -> list[str]:
        """Return the lines due at `now`, and count them as sent.

        Args:
            now: monotonic seconds.
            text: the daemon's state, for people.
            progress: a number that grows until the pool is usable; then None.
        """
        lines = []
        if not self._ready_sent:
            self._ready_sent = True
            lines.append("READY=1")
        text = " ".join(text.split())[:_MAX_TEXT_CHARS]
        self._next_text = now + _TEXT_SECONDS
        if text != self._text:
            self._text = text
            lines.append(f"STATUS={text}")
        if now >= self._next_beat:
            self._next_beat = now + self.period
            if self.watchdog:
                lines.append("WATCHDOG=1")
            if progress is not None and progress != self._progress:
                lines.append(f"EXTEND_TIMEOUT_USEC={_usec(2 * self.period)}")
            self._progress = progress
        return lines

    def extend_start(self, seconds: float) -> None:
        """Ask the manager to wait `seconds` for READY."""
        self._queue([f"EXTEND_TIMEOUT_USEC={_usec(seconds)}"])

    def notify_stopping(self, seconds: float) -> None:
        """Announce that the daemon stops, and its lanes within `seconds`."""
        self._queue(["STOPPING=1", f"EXTEND_TIMEOUT_USEC={_usec(seconds + SHUTDOWN_SECONDS)}"])

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _queue(self, lines: list[str]) -> None:
        if lines and self._socket is not None:
            self._unsent.append("\n".join(lines).encode())
            self._flush()

    def _flush(self) -> None:
        target = "\0" + self.address[1:] if self.address[0] == "@" else self.address
        while self._unsent and self._socket is not None:
            try:
                self._socket.sendto(self._unsent[0], target)
            except BlockingIOError:
                return
            except OSError as error:
                if self._delivered:
                    log.warning("NOTIFY_SOCKET=%s: %s", self.address, error.strerror)
                self._delivered = False
            else:
                if not self._delivered:
                    self._ready_sent = False  # READY may be among the dropped messages
                self._delivered = True
            self._unsent.popleft()


def _state_text(state: BrokerState, now: float) -> str:
    missing = [str(check) for check in readiness_checks(state, now) if not check.ok]
    return "serving, not ready: " + "; ".join(missing) if missing else "ready"


def _usec(seconds: float) -> int:
    return int(seconds * 1_000_000)
