"""The circuit breaker of a tier, as a state table.

Closed: the tier gets orders. Open: it gets none, and engines miss what it holds. Half-open: after
a pause, once its batches have ended, one order probes it; success closes the breaker, failure opens
it for longer. The breaker opens when

- batches are outstanding without progress for `late_seconds`, or the process does not answer,
- at least half of the recent batches have failed, and at least four,
- three chunks within a minute were corrupt,
- the tier's process has ended,
- a decision about tiers has raised an exception.

A full tier does not open it: puts pause for a while, see `kvd.broker.tiers.tier`. All times are
monotonic seconds, passed in: nothing here reads a clock.
"""

from collections import deque
from enum import Enum, StrEnum, auto

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
QUIET_SECONDS = 10.0
"""After so long in the closed state the pause starts from `FIRST_PAUSE` again."""
RECENT_BATCHES, FEWEST_FAILED = 16, 4
MOST_CORRUPT, CORRUPT_SECONDS = 3, 60.0


class BreakerState(StrEnum):
    """Which orders the tier gets."""

    CLOSED = "closed"  # all
    OPEN = "open"  # none
    HALF_OPEN = "probing"  # one probe


class BreakerSignal(Enum):
    """What changes the state."""

    TRIP = auto()  # the tier is late, fails or has ended
    DUE = auto()  # the pause is over, and no batch is outstanding
    PROVEN = auto()  # the probe succeeded


TRANSITIONS: dict[tuple[BreakerState, BreakerSignal], BreakerState] = {
    (BreakerState.CLOSED, BreakerSignal.TRIP): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerSignal.DUE): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerSignal.TRIP): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerSignal.PROVEN): BreakerState.CLOSED,
}
"""The next state by state and signal; for pairs not listed the state stays."""


class Breaker:
    """The breaker of one tier.

    Args:
        late_seconds: time without progress, with batches outstanding, after which it opens.
        opened: counters by reason, incremented when it opens.

    Attributes:
        state: see `BreakerState`.
        why: the reason why it opened last; empty if it never did.
        since: when the state last entered or left CLOSED, or the process started while CLOSED.
        retry_at: the earliest time of the next probe.
        moved_at: time of the last progress, or of the first order sent to an idle tier.
    """

    def __init__(self, late_seconds: float, opened: dict[str, int] | None = None) -> None:
        self.late_seconds = late_seconds
        self.opened = {} if opened is None else opened
        self.state = BreakerState.CLOSED
        self.why = ""
        self.since = self.retry_at = self.moved_at = 0.0
        self._pause = FIRST_PAUSE / 2
        self._failed: deque[bool] = deque(maxlen=RECENT_BATCHES)
        self._corrupt: deque[float] = deque(maxlen=MOST_CORRUPT)

    @property
    def closed(self) -> bool:
        """Whether the tier gets all orders."""
        return self.state is BreakerState.CLOSED

    # --------------------------------------------------------------- what is seen

    def process_changed(self, now: float) -> None:
        """Restart `since` of a closed breaker: the process has started, or begun to serve."""
        if self.closed:
            self.since = now

    def held_up(self, seconds: float, now: float) -> None:
        """Do not count `seconds` as lateness: the broker's own loop stood still for so long."""
        self.moved_at = min(now, self.moved_at + seconds)

    def ended(self, now: float, *, failed: bool) -> None:
        """Record the end of a batch: closed, it counts among the recent ones; a probe decides."""
        if self.state is BreakerState.HALF_OPEN:
            if failed:
                self.trip("failed", now, "its probe failed")
            else:
                self._signal(BreakerSignal.PROVEN, now)
        elif self.closed:  # a batch that ends while open was sent before and does not count
            self._failed.append(failed)
            bad = sum(self._failed)
            if bad >= FEWEST_FAILED and 2 * bad >= len(self._failed):
                self.trip("failed", now, f"{bad} of its last {len(self._failed)} batches failed")

    def corrupt(self, now: float) -> None:
        """Record a corrupt chunk; trip after `MOST_CORRUPT` within `CORRUPT_SECONDS`."""
        self._corrupt.append(now)
        if len(self._corrupt) == MOST_CORRUPT and now - self._corrupt[0] < CORRUPT_SECONDS:
            self.trip("corrupt", now, f"{MOST_CORRUPT} chunks of a minute were corrupt")

    def look(self, now: float, *, outstanding: bool) -> None:
        """Trip if outstanding batches are late; become half-open if idle and the pause is over."""
        if not outstanding:
            if now >= self.retry_at:
                self._signal(BreakerSignal.DUE, now)
        elif now - self.moved_at >= self.late_seconds:
            self.trip("late", now, f"nothing moved for {now - self.moved_at:.2f} s")

    def prove(self, now: float) -> None:
        """Close a half-open breaker without a probe: there was no order to probe it with."""
        self._signal(BreakerSignal.PROVEN, now)

    # ------------------------------------------------------------------ the table

    def trip(self, reason: str, now: float, why: str) -> None:
        """Open the breaker, unless it is open. The pause doubles unless `QUIET_SECONDS` apply.

        Args:
            reason: the metric's label, see `kvd.metrics.counts.BREAKER_REASONS`.
            now: monotonic seconds.
            why: the reason in words, for log and status.
        """
        before, quiet = self.state, self.closed and now - self.since >= QUIET_SECONDS
        self._signal(BreakerSignal.TRIP, now)
        if self.state is before:
            return
        self._pause = FIRST_PAUSE if quiet else min(2 * self._pause, LONGEST_PAUSE)
        self.retry_at, self.why = now + self._pause, why
        if before is BreakerState.CLOSED:  # a failed probe does not count again
            self.opened[reason] = self.opened.get(reason, 0) + 1
        self._failed.clear()
        self._corrupt.clear()

    def _signal(self, signal: BreakerSignal, now: float) -> None:
        """Change the state as `TRANSITIONS` says."""
        before, self.state = self.state, TRANSITIONS.get((self.state, signal), self.state)
        if self.state is not before and BreakerState.CLOSED in {before, self.state}:
            self.since = now
