"""What is known of a child process, and the one rule by which it counts as dead.

A process owes a message from its start until the first one, and from a ping until the next one.
One that has owed a message for longer than a limit is killed.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ChildState:
    """One child of the daemon, over all its processes. Times are monotonic seconds.

    pid: of the present process or, where none serves, the last one; 0 before the first.
    up: the present process has said that it serves.
    killed: it was decided to kill the present process, which has not ended.
    last_error: how the last process ended, or what the present one has reported.
    heard_at: when its last message came.
    owes_since: since when it has owed a message; None where it owes none.
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
        """A process was started."""
        self.ended()
        self.owes_since = now

    def serves(self, pid: int) -> None:
        """The process says that it serves."""
        self.up, self.pid = True, pid

    def heard(self, now: float) -> None:
        """A message of its has come."""
        self.heard_at, self.owes_since = now, None

    def expect(self, now: float) -> None:
        """It owes a message from now on, if not longer."""
        if self.owes_since is None:
            self.owes_since = now

    def ping_due(self, now: float, seconds: float) -> bool:
        """Whether to ping it now, once in so many seconds; it owes a message then."""
        if now - self._pinged_at < seconds:
            return False
        self._pinged_at = now
        self.expect(now)
        return True

    def silent(self, now: float) -> float:
        """For how many seconds it has owed a message."""
        return 0.0 if self.owes_since is None else now - self.owes_since

    def check(self, now: float, limit: float) -> str:
        """Return why it has to be killed, once; empty where it owes nothing for so long.

        Of the time since the last check a quarter of the limit counts at most: a broker that stood
        still has received nothing meanwhile.
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
        """Its process has ended."""
        self.up = self.killed = False
        self.owes_since = None
