"""The circuit breaker of a tier, as a state table.

Closed: the tier gets orders. Open: it gets none, and engines miss what it holds. Half-open: after
a pause, once its batches have ended, one order probes it; success closes the breaker, failure opens
it for longer. The breaker opens when

- batches are outstanding without progress for `late_seconds`, or the process does not answer,
- at least half of the recent batches have failed, and at least four,
- three chunks within a minute were corrupt,
- the tier's process has ended,
- a decision about tiers has raised an exception.

A full tier does not open it: puts pause for a while (`TierProcess.on_full`). All times are
monotonic seconds, passed in: nothing here reads a clock.
"""

from collections import deque
from enum import Enum, StrEnum, auto

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 5.0
QUIET_SECONDS = 10.0
"""After this time in the closed state the pause starts from `FIRST_PAUSE_SECONDS` again."""
RECENT_BATCHES, MIN_FAILED = 16, 4
MAX_CORRUPT, CORRUPT_SECONDS = 3, 60.0


class BreakerState(StrEnum):
    """The orders that the tier gets."""

    CLOSED = "closed"  # all
    OPEN = "open"  # none
    HALF_OPEN = "probing"  # one probe


class BreakerSignal(Enum):
    """An event that may change the state."""

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
        reason: why it opened last, in words; empty if it never did.
        since: when the state last entered or left CLOSED, or the process started while CLOSED.
        retry_at: the earliest time of the next probe.
        moved_at: time of the last progress, or of the first order sent to an idle tier.
    """

    def __init__(self, late_seconds: float, opened: dict[str, int] | None = None) -> None:
        self.late_seconds = late_seconds
        self.opened = {} if opened is None else opened
        self.state = BreakerState.CLOSED
        self.reason = ""
        self.since = self.retry_at = self.moved_at = 0.0
        self._pause = FIRST_PAUSE_SECONDS / 2
        self._recent: deque[bool] = deque(maxlen=RECENT_BATCHES)
        self._corrupt_at: deque[float] = deque(maxlen=MAX_CORRUPT)

    @property
    def closed(self) -> bool:
        """Whether the tier gets all orders."""
        return self.state is BreakerState.CLOSED

    # --------------------------------------------------------------- observations

    def process_changed(self, now: float) -> None:
        """Restart `since` of a closed breaker: the process has started, or begun to serve."""
        if self.closed:
            self.since = now

    def excuse(self, seconds: float, now: float) -> None:
        """Exclude `seconds` from lateness: the broker's own loop stood still for this long."""
        self.moved_at = min(now, self.moved_at + seconds)

    def batch_ended(self, now: float, *, failed: bool) -> None:
        """Record the end of a batch. Half-open, it is the probe, which closes or opens the breaker.

        Closed, it counts among the recent batches. Open, it was sent before and does not count.
        """
        if self.state is BreakerState.HALF_OPEN:
            if failed:
                self.trip("failed", now, "its probe failed")
            else:
                self._signal(BreakerSignal.PROVEN, now)
        elif self.closed:
            self._recent.append(failed)
            num_failed, num_recent = sum(self._recent), len(self._recent)
            if num_failed >= MIN_FAILED and 2 * num_failed >= num_recent:
                self.trip("failed", now, f"{num_failed} of its last {num_recent} batches failed")

    def chunk_corrupt(self, now: float) -> None:
        """Record a corrupt chunk; trip after `MAX_CORRUPT` within `CORRUPT_SECONDS`."""
        self._corrupt_at.append(now)
        if len(self._corrupt_at) == MAX_CORRUPT and now - self._corrupt_at[0] < CORRUPT_SECONDS:
            self.trip("corrupt", now, f"{MAX_CORRUPT} chunks of a minute were corrupt")

    def check(self, now: float, *, outstanding: bool) -> None:
        """Trip if outstanding batches are late; without any, become half-open after the pause."""
        if not outstanding:
            if now >= self.retry_at:
                self._signal(BreakerSignal.DUE, now)
        elif now - self.moved_at >= self.late_seconds:
            self.trip("late", now, f"nothing moved for {now - self.moved_at:.2f} s")

    def skip_probe(self, now: float) -> None:
        """Close a half-open breaker for which there was no order to probe it with."""
        self._signal(BreakerSignal.PROVEN, now)

    # ---------------------------------------------------------------- transitions

    def trip(self, label: str, now: float, reason: str) -> None:
        """Open the breaker, unless it is open. The pause doubles unless `QUIET_SECONDS` apply.

        Args:
            label: of the metric, see `kvd.metrics.counts.BREAKER_REASONS`.
            now: monotonic seconds.
            reason: in words, for log and status.
        """
        previous, quiet = self.state, self.closed and now - self.since >= QUIET_SECONDS
        self._signal(BreakerSignal.TRIP, now)
        if self.state is previous:
            return
        self._pause = FIRST_PAUSE_SECONDS if quiet else min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self.retry_at, self.reason = now + self._pause, reason
        if previous is BreakerState.CLOSED:  # a failed probe does not count again
            self.opened[label] = self.opened.get(label, 0) + 1
        self._recent.clear()
        self._corrupt_at.clear()

    def _signal(self, signal: BreakerSignal, now: float) -> None:
        """Change the state as `TRANSITIONS` says."""
        previous, self.state = self.state, TRANSITIONS.get((self.state, signal), self.state)
        if self.state is not previous and BreakerState.CLOSED in {previous, self.state}:
            self.since = now
