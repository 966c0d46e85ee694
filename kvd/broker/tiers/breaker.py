"""When a tier is set aside, and when it is tried again: a circuit breaker, as a table.

Closed: orders go to it. Open: it gets none, and engines miss what it holds. After a pause, and
when it has ended what it had begun, it is probed with one order; what comes of that closes the
breaker, or opens it for longer. It opens when

- something is outstanding and nothing has moved for `late_seconds`,
- half of the last batches, four at least, have failed,
- three chunks within a minute were not what had been stored,
- its process has ended,
- the broker could not go on with it.

A tier that is full is none of these: it only gets nothing more for a while, see
`kvd.broker.tiers.tier`. All times are monotonic seconds and given, nothing here looks at a clock.
"""

from collections import deque
from enum import StrEnum

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
QUIET_SECONDS = 10.0
"""One that was closed for so long begins with the first pause again."""
RECENT_BATCHES, FEWEST_FAILED = 16, 4
MOST_CORRUPT, CORRUPT_SECONDS = 3, 60.0


class State(StrEnum):
    """What the tier is used for."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing
    PROBING = "probing"  # one order at a time


class Signal(StrEnum):
    """What has been seen of it."""

    LATE = "late"
    FAILED = "failed"  # half of the last batches, or the probe
    CORRUPT = "corrupt"
    LOST = "lost"
    WRONG = "wrong"  # the broker could not go on with it
    DUE = "due"  # the pause is over, and it is idle
    PROVEN = "proven"  # the probe went well


_BAD = (Signal.LATE, Signal.FAILED, Signal.CORRUPT, Signal.LOST, Signal.WRONG)
TABLE: dict[tuple[State, Signal], State] = {
    **{(State.CLOSED, signal): State.OPEN for signal in _BAD},
    **{(State.PROBING, signal): State.OPEN for signal in _BAD},
    (State.OPEN, Signal.DUE): State.PROBING,
    (State.PROBING, Signal.PROVEN): State.CLOSED,
}
"""What follows; where a pair is not there, the state stays."""


class Breaker:
    """The breaker of one tier.

    Args:
        late_seconds: without progress, while something is outstanding.
        opened: counts by signal how often it opened.

    Attributes:
        state: see `State`.
        why: it opened last; empty where it never did.
        since: when it got into this state.
        opened_at: when it was closed last, where it is not.
        retry_at: when an open one may be probed.
        moved_at: when anything moved last, or was sent to an idle tier.
    """

    def __init__(self, late_seconds: float, opened: dict[str, int] | None = None) -> None:
        self.late_seconds = late_seconds
        self.opened = {} if opened is None else opened
        self.state = State.CLOSED
        self.why = ""
        self.since = self.opened_at = self.retry_at = self.moved_at = 0.0
        self._pause = FIRST_PAUSE / 2
        self._failed: deque[bool] = deque(maxlen=RECENT_BATCHES)
        self._corrupt: deque[float] = deque(maxlen=MOST_CORRUPT)

    @property
    def closed(self) -> bool:
        """Whether the tier is used as ever."""
        return self.state is State.CLOSED

    @property
    def changed_at(self) -> float:
        """When the tier came into use, or ceased to be in use: a probe changes neither."""
        return self.since if self.closed else self.opened_at

    # --------------------------------------------------------------- what is seen

    def process_changed(self, now: float) -> None:
        """Its process has started, or serves: a closed breaker's state counts from then."""
        if self.closed:
            self.since = now

    def sent(self, now: float, *, idle: bool) -> None:
        """An order went out; `idle`: nothing was outstanding before it."""
        if idle:
            self.moved_at = now

    def moved(self, now: float) -> None:
        """A chunk's transfer or a batch has ended, well or not."""
        self.moved_at = now

    def held_up(self, seconds: float, now: float) -> None:
        """For so long whoever watches saw nothing: that is not the tier's doing."""
        self.moved_at = min(now, self.moved_at + seconds)

    def ended(self, now: float, *, failed: bool) -> None:
        """A batch has ended: those of a closed one are counted, a probe decides."""
        if self.state is State.PROBING:
            self.signal(Signal.FAILED if failed else Signal.PROVEN, now, "its probe failed")
            return
        if not self.closed:  # it was sent before
            return
        self._failed.append(failed)
        bad = sum(self._failed)
        if bad >= FEWEST_FAILED and 2 * bad >= len(self._failed):
            text = f"{bad} of its last {len(self._failed)} batches failed"
            self.signal(Signal.FAILED, now, text)

    def corrupt(self, now: float) -> None:
        """A chunk was not what had been stored."""
        self._corrupt.append(now)
        if len(self._corrupt) == MOST_CORRUPT and now - self._corrupt[0] < CORRUPT_SECONDS:
            self.signal(Signal.CORRUPT, now, f"{MOST_CORRUPT} chunks of a minute were corrupt")

    def lost(self, now: float, why: str) -> None:
        """Its process has ended."""
        self.signal(Signal.LOST, now, why)

    def wrong(self, now: float, why: str) -> None:
        """Whoever watches could not go on with it: each time in a row the pause is longer."""
        if self.state is State.OPEN:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self.retry_at, self.why = now + self._pause, why
        else:
            self.signal(Signal.WRONG, now, why)

    def look(self, now: float, *, outstanding: bool) -> None:
        """See whether it is late, or may be probed."""
        if outstanding:
            if now - self.moved_at >= self.late_seconds:
                self.signal(Signal.LATE, now, f"nothing moved for {now - self.moved_at:.2f} s")
        elif now >= self.retry_at:
            self.signal(Signal.DUE, now)

    # ------------------------------------------------------------------ the table

    def signal(self, signal: Signal, now: float, why: str = "") -> None:
        """Go on as the table says."""
        after = TABLE.get((self.state, signal), self.state)
        if after is self.state:
            return
        if after is State.OPEN:
            quiet = self.closed and now - self.since >= QUIET_SECONDS
            self._pause = FIRST_PAUSE if quiet else min(2 * self._pause, LONGEST_PAUSE)
            self.retry_at = now + self._pause
            self.why = why
            if self.closed:  # a probe that fails is no second time
                self.opened_at = now
                self.opened[signal.value] = self.opened.get(signal.value, 0) + 1
            self._failed.clear()
            self._corrupt.clear()
        self.state, self.since = after, now

    def __repr__(self) -> str:
        return f"<Breaker {self.state}{f', {self.why}' if self.why else ''}>"
