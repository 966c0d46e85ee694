"""What the service manager is told and when: the content of sd_notify(3), decided purely.

READY means *serving*: requests are answered and engines may connect. It does
not wait for the pool. A large pool takes minutes, ``cpu_bytes = "auto"`` has
none before an engine came, and an engine that is ordered after kvd must be
able to start meanwhile. Whoever wants to wait for the pool asks
``kvd status --wait`` or ``/readyz``.

While the pool is on its way, each beat that finds progress asks for more
time, so that a start job which does wait for it is not ended; a pool that
stands still gets none.
"""

SLOWEST_BEAT_SECONDS = 5.0
SHUTDOWN_SECONDS = 60.0  # a lane's end unpins its memory: tens of seconds for a large pool
_TEXT_SECONDS = 1.0
_LONGEST_TEXT = 400


class Notices:
    """When the next message is due, and what it says.

    Args:
        watchdog_seconds: the manager's patience, or None where it has no watchdog.
    """

    def __init__(self, watchdog_seconds: float | None) -> None:
        self.watchdog = watchdog_seconds is not None
        self.period = min(watchdog_seconds or 2 * SLOWEST_BEAT_SECONDS, 3600.0) / 2
        self._started = False
        self._next_beat = 0.0
        self._next_text = 0.0
        self._text = ""
        self._progress: float | None = None

    def due(self, now: float) -> bool:
        """Something may have to be said at `now` (monotonic seconds)."""
        return not self._started or now >= min(self._next_beat, self._next_text)

    def turn(self, now: float, text: str, progress: float | None) -> list[str]:
        """The lines due at `now`; empty when there is nothing new.

        Args:
            now: monotonic seconds.
            text: how the daemon stands, for people.
            progress: a figure that grows until the daemon is ready, None once it is.
        """
        lines = []
        if not self._started:
            self._started = True
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

    @staticmethod
    def stopping(seconds: float) -> list[str]:
        """The daemon ends, at most `seconds` of draining from now."""
        return ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={_usec(seconds + SHUTDOWN_SECONDS)}"]

    @staticmethod
    def reloading(now: float) -> list[str]:
        """The settings are being read again."""
        return ["RELOADING=1", f"MONOTONIC_USEC={_usec(now)}"]

    def repeat(self) -> None:
        """The next turn says READY again: after a reload, or to a manager that was away."""
        self._started = False

    def __repr__(self) -> str:
        watchdog = f"watchdog every {self.period:g} s" if self.watchdog else "no watchdog"
        return f"<Notices {'ready' if self._started else 'starting'}, {watchdog}>"


def _usec(seconds: float) -> int:
    return int(seconds * 1_000_000)
