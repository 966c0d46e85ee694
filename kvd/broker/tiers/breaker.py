"""When a tier is set aside, and when it is tried again: a circuit breaker, as a table.

Closed: orders go to it. Open: it gets none, and engines miss what it holds. After a pause, and
when it has ended what it had begun, it is half-open: one order probes it. What comes of that closes
the breaker, or opens it for longer. It opens when

- something is outstanding and nothing has moved for `late_seconds`, or its process is silent,
- half of the last batches, four at least, have failed,
- three chunks within a minute were not what had been stored,
- its process has ended,
- a decision about tiers has raised an exception.

A tier that is full is none of these: it only gets nothing more for a while, see
`kvd.broker.tiers.tier`. All times are monotonic seconds and given, nothing here looks at a clock.
"""

from collections import deque
from enum import Enum, StrEnum, auto

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
QUIET_SECONDS = 10.0
"""One that was closed for so long begins with the first pause again."""
RECENT_BATCHES, FEWEST_FAILED = 16, 4
MOST_CORRUPT, CORRUPT_SECONDS = 3, 60.0


class State(StrEnum):
    """What the tier is used for."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing
    HALF_OPEN = "probing"  # one order


class Signal(Enum):
    """What moves the breaker."""

    TRIP = auto()  # it is late, fails or has ended
    DUE = auto()  # the pause is over, and the tier is idle
    PROVEN = auto()  # the probe went well


TABLE: dict[tuple[State, Signal], State] = {
    (State.CLOSED, Signal.TRIP): State.OPEN,
    (State.OPEN, Signal.DUE): State.HALF_OPEN,
    (State.HALF_OPEN, Signal.TRIP): State.OPEN,
    (State.HALF_OPEN, Signal.PROVEN): State.CLOSED,
}
"""What follows; where a pair is not there, the state stays."""


class Breaker:
    """The breaker of one tier.

    Args:
        late_seconds: without progress, while something is outstanding.
        opened: counts by reason how often it opened.

    Attributes:
        state: see `State`.
        why: it opened last; empty where it never did.
        since: when the tier came into use, or ceased to be in use: a probe changes neither.
        retry_at: when an open one may be probed.
        moved_at: when anything moved last, or was sent to an idle tier.
    """

    def __init__(self, late_seconds: float, opened: dict[str, int] | None = None) -> None:
        self.late_seconds = late_seconds
        self.opened = {} if opened is None else opened
        self.state = State.CLOSED
        self.why = ""
        self.since = self.retry_at = self.moved_at = 0.0
        self._pause = FIRST_PAUSE / 2
        self._failed: deque[bool] = deque(maxlen=RECENT_BATCHES)
        self._corrupt: deque[float] = deque(maxlen=MOST_CORRUPT)

    @property
    def closed(self) -> bool:
        """Whether the tier is used as ever."""
        return self.state is State.CLOSED

    # --------------------------------------------------------------- what is seen

    def process_changed(self, now: float) -> None:
        """Its process has started, or serves: a closed breaker's state counts from then."""
        if self.closed:
            self.since = now

    def held_up(self, seconds: float, now: float) -> None:
        """The broker's loop stood still for so long: that is not the tier's doing."""
        self.moved_at = min(now, self.moved_at + seconds)

    def ended(self, now: float, *, failed: bool) -> None:
        """A batch has ended: those of a closed one are counted, a probe decides."""
        if self.state is State.HALF_OPEN:
            if failed:
                self.trip("failed", now, "its probe failed")
            else:
                self._signal(Signal.PROVEN, now)
        elif self.closed:  # what ends while it is open was sent before
            self._failed.append(failed)
            bad = sum(self._failed)
            if bad >= FEWEST_FAILED and 2 * bad >= len(self._failed):
                self.trip("failed", now, f"{bad} of its last {len(self._failed)} batches failed")

    def corrupt(self, now: float) -> None:
        """A chunk was not what had been stored."""
        self._corrupt.append(now)
        if len(self._corrupt) == MOST_CORRUPT and now - self._corrupt[0] < CORRUPT_SECONDS:
            self.trip("corrupt", now, f"{MOST_CORRUPT} chunks of a minute were corrupt")

    def look(self, now: float, *, outstanding: bool) -> None:
        """See whether it is late, or may be probed."""
        if not outstanding:
            if now >= self.retry_at:
                self._signal(Signal.DUE, now)
        elif now - self.moved_at >= self.late_seconds:
            self.trip("late", now, f"nothing moved for {now - self.moved_at:.2f} s")

    def prove(self, now: float) -> None:
        """There is nothing to probe it with, nor to lose: it is used again."""
        self._signal(Signal.PROVEN, now)

    # ------------------------------------------------------------------ the table

    def trip(self, reason: str, now: float, why: str) -> None:
        """Open, unless it is open: for twice as long as the last time, if that was not long ago.

        Args:
            reason: as metrics count it, see `kvd.metrics.counts.BREAKER_REASONS`.
            now: monotonic seconds.
            why: for people.
        """
        before, quiet = self.state, self.closed and now - self.since >= QUIET_SECONDS
        self._signal(Signal.TRIP, now)
        if self.state is before:
            return
        self._pause = FIRST_PAUSE if quiet else min(2 * self._pause, LONGEST_PAUSE)
        self.retry_at, self.why = now + self._pause, why
        if before is State.CLOSED:  # a probe that fails is no second time
            self.opened[reason] = self.opened.get(reason, 0) + 1
        self._failed.clear()
        self._corrupt.clear()

    def _signal(self, signal: Signal, now: float) -> None:
        """Go on as the table says."""
        before, self.state = self.state, TABLE.get((self.state, signal), self.state)
        if self.state is not before and State.CLOSED in {before, self.state}:
            self.since = now

    def __repr__(self) -> str:
        return f"<Breaker {self.state}{f', {self.why}' if self.why else ''}>"
