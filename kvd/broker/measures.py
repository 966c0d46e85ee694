"""What the broker measures of itself while it runs."""

from collections import Counter, deque
from dataclasses import dataclass, field

from kvd.broker.lookups import LookupTotals
from kvd.metrics.histogram import Histogram

LAG_BOUNDS = (
    *(100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 5.0),
)
"""Upper bounds in seconds."""
LIMITS = (
    "max_sessions",
    "max_sessions_per_user",
    "max_namespaces",
    "max_leases",
    "cuda_lanes",
    "sweeps",
)
"""Settings and bounds at which somebody is turned away."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What only the outside knows: handed in, like `BrokerState.available_bytes`.

    time: unix seconds. host: the machine's name. max_fds: the limit of open descriptors, 0 where
    there is none.
    dropped_frames: frames that were no messages, and replies that nobody read.
    """

    time: float = 0.0
    host: str = ""
    cpu_seconds: float = 0.0
    rss_bytes: int = 0
    open_fds: int = 0
    max_fds: int = 0
    dropped_frames: int = 0


class RecentMax:
    """The greatest value of the last `seconds`, to within a `parts`-th of them."""

    def __init__(self, seconds: float = 60.0, parts: int = 12) -> None:
        self._part = seconds / parts
        self._parts = parts
        self._greatest: deque[tuple[int, float]] = deque()  # number of the part, its greatest

    def observe(self, value: float, now: float) -> None:
        """Take a value in; `now` never goes back."""
        part = int(now / self._part)
        if not self._greatest or self._greatest[-1][0] != part:
            self._greatest.append((part, value))
            self._forget(part)
        elif value > self._greatest[-1][1]:
            self._greatest[-1] = (part, value)

    def get(self, now: float) -> float:
        """The greatest; 0 where there was none."""
        self._forget(int(now / self._part))
        return max((value for _, value in self._greatest), default=0.0)

    def _forget(self, part: int) -> None:
        while self._greatest and self._greatest[0][0] <= part - self._parts:
            self._greatest.popleft()

    def __repr__(self) -> str:
        return f"<RecentMax of {len(self._greatest)} parts>"


@dataclass(slots=True)
class Measures:
    """Counts and times since the start.

    loop_lag: seconds for which one turn of the loop kept it from polling.
    requests: by type; refusals: by code; limits: times that each
    was reached, by the setting or bound.
    """

    started: float = 0.0
    loop_lag: Histogram = field(default_factory=lambda: Histogram(LAG_BOUNDS))
    recent_lag: RecentMax = field(default_factory=RecentMax)
    requests: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(LIMITS, 0)))
    lookups: LookupTotals = field(default_factory=LookupTotals)

    def reached(self, limit: str) -> None:
        """Somebody was turned away for this limit; an empty one is none."""
        if limit:
            self.limits[limit] += 1

    def turn(self, seconds: float, now: float) -> None:
        """A turn of the loop has ended."""
        self.loop_lag.observe(seconds)
        self.recent_lag.observe(seconds, now)
