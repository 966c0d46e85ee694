"""Messages to the service manager over ``$NOTIFY_SOCKET``; see sd_notify(3).

The watchdog is fed at the end of a turn of the loop and nowhere else, so a loop that stands
still is seen. A manager that does not read never holds the loop up: what cannot be sent waits
for the next turn. Where no manager listens it is dropped.

READY means *serving*: requests are answered and engines may connect. It does not wait for the
pool: a large one takes minutes, ``cpu_bytes = "auto"`` has none before an engine came, and an
engine that is ordered after kvd must be able to start meanwhile. Whoever wants to wait for the
pool asks ``kvd status --wait`` or ``/readyz``.
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
_MAX_WAITING = 16
SLOWEST_BEAT_SECONDS = 5.0
SHUTDOWN_SECONDS = 30.0  # of what follows the lanes' end: tiers, the pool's files
_TEXT_SECONDS = 1.0
_LONGEST_TEXT = 400


class Notifier:
    """The connection to the service manager; silent where there is none.

    While the pool is on its way, each beat that finds progress asks for more time, so that a
    start job which waits for the pool is not ended; a pool that stands still gets none.

    Args:
        address: a path, or ``@`` and a name in the abstract namespace; empty for none.
        watchdog_seconds: the manager's patience, or None where it has no watchdog.
    """

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        self.address = address
        self.watchdog = watchdog_seconds is not None
        self.period = min(watchdog_seconds or 2 * SLOWEST_BEAT_SECONDS, 3600.0) / 2
        self._said_ready = False
        self._next_beat = 0.0
        self._next_text = 0.0
        self._text = ""
        self._progress: float | None = None
        self._waiting: deque[bytes] = deque(maxlen=_MAX_WAITING)
        self._reached = True
        self._reloading = False
        self._socket: socket.socket | None = None
        if address[:1] in {"/", "@"}:
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._socket = socket.socket(socket.AF_UNIX, kind)
        elif address:
            log.warning("NOTIFY_SOCKET=%s is neither a path nor @name: not used", address)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Notifier":
        """Read the variables of sd_notify(3) and sd_watchdog_enabled(3).

        Raises:
            ConfigError: WATCHDOG_USEC is no number of microseconds.
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
        """A turn of the loop has ended; `reloading` while the settings are being read again."""
        if self._socket is None:
            return
        if reloading and not self._reloading:
            self._say(["RELOADING=1", f"MONOTONIC_USEC={_usec(now)}"])
        elif self._reloading and not reloading:
            self._said_ready = False
        self._reloading = reloading
        if self.due(now) and not self._waiting:
            progress = (
                None if state.pool_usable else float(state.allocated_bytes + state.pinned_bytes)
            )
            self._say(self.lines(now, _standing(state, now), progress))
        self._flush()

    def due(self, now: float) -> bool:
        """Something may have to be said at `now` (monotonic seconds)."""
        return not self._said_ready or now >= min(self._next_beat, self._next_text)

    def lines(self, now: float, text: str, progress: float | None) -> list[str]:
        """Return what is due at `now`; empty when there is nothing new.

        Args:
            now: monotonic seconds.
            text: how the daemon stands, for people.
            progress: a figure that grows until the daemon is ready, None once it is.
        """
        lines = []
        if not self._said_ready:
            self._said_ready = True
            lines.append("READY=1")
        text = " ".join(text.split())[:_LONGEST_TEXT]
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

    def stopping(self, seconds: float) -> None:
        """The daemon ends; its lanes do within `seconds`."""
        self._say(["STOPPING=1", f"EXTEND_TIMEOUT_USEC={_usec(seconds + SHUTDOWN_SECONDS)}"])

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _say(self, lines: list[str]) -> None:
        if lines and self._socket is not None:
            self._waiting.append("\n".join(lines).encode())
            self._flush()

    def _flush(self) -> None:
        target = "\0" + self.address[1:] if self.address[0] == "@" else self.address
        while self._waiting and self._socket is not None:
            try:
                self._socket.sendto(self._waiting[0], target)
            except BlockingIOError:
                return
            except OSError as error:
                if self._reached:
                    log.warning("NOTIFY_SOCKET=%s: %s", self.address, error.strerror)
                self._reached = False
            else:
                if not self._reached:
                    self._said_ready = False  # what was dropped may have been READY
                self._reached = True
            self._waiting.popleft()

    def __repr__(self) -> str:
        where = self.address if self._socket is not None else "no manager"
        watchdog = f"watchdog every {self.period:g} s" if self.watchdog else "no watchdog"
        return f"<Notifier to {where}, {watchdog}, {len(self._waiting)} waiting>"


def _standing(state: BrokerState, now: float) -> str:
    missing = [str(check) for check in readiness_checks(state, now) if not check.ok]
    return "serving, not ready: " + "; ".join(missing) if missing else "ready"


def _usec(seconds: float) -> int:
    return int(seconds * 1_000_000)
