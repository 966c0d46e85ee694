"""Liveness of a child process: a process that owes a message for longer than a limit is killed.

A process owes a message from its start until its first one, and from a ping until the next one.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ChildState:
    """State of one child of the daemon, across restarts. Times are monotonic seconds.

    pid: of the process that served last; 0 before the first.
    up: the current process has reported that it serves.
    killed: the current process is to be killed, and has not ended yet.
    last_error: how the last process ended, or what the current one has reported.
    heard_at: when the last message came.
    owes_since: since when the process has owed a message; None if it owes none.
    """

    pid: int = 0
    up: bool = False
    killed: bool = False
    last_error: str = ""
    heard_at: float = 0.0
    owes_since: float | None = None
    _checked_at: float = 0.0
    _pinged_at: float = 0.0

    def started(self, now: float) -> None:
        """Record that a process was started, which owes its first message."""
        self.ended()
        self.owes_since = now

    def serves(self, pid: int) -> None:
        """Record that the process has reported that it serves."""
        self.up, self.pid = True, pid

    def heard(self, now: float) -> None:
        """Record a message from the process, which now owes none."""
        self.heard_at, self.owes_since = now, None

    def expect(self, now: float) -> None:
        """Record that the process owes a message, from now unless it already owes one."""
        if self.owes_since is None:
            self.owes_since = now

    def ping_due(self, now: float, seconds: float) -> bool:
        """Whether to ping now, once every `seconds`; if True, the process owes a message."""
        if now - self._pinged_at < seconds:
            return False
        self._pinged_at = now
        self.expect(now)
        return True

    def silent(self, now: float) -> float:
        """Seconds for which the process has owed a message."""
        return 0.0 if self.owes_since is None else now - self.owes_since

    def check(self, now: float, limit: float) -> str:
        """Return why the process must be killed, once; empty while it may live.

        At most a quarter of `limit` counts between two checks: a broker that was suspended has
        received nothing meanwhile.
        """
        stood_still = now - self._checked_at - limit / 4
        self._checked_at = now
        if self.owes_since is None or self.killed:
            return ""
        if stood_still > 0:
            self.owes_since = min(now, self.owes_since + stood_still)
        silent = now - self.owes_since
        if silent <= limit:
            return ""
        self.killed = True
        return f"did not report for {silent:.1f} s"

    def ended(self) -> None:
        """Record that the process has ended."""
        self.up = self.killed = False
        self.owes_since = None
