"""What is published as KV events: by engines, which tell it, and by the daemon's own publisher."""

from dataclasses import dataclass, field

from kvd.broker.measures import RecentMax
from kvd.metrics.counts import EventCounts
from kvd_proto.messages import KvEvents


@dataclass(slots=True)
class Published:
    """What one publisher has published, all its processes and sessions together.

    lag: the largest of the last minute, in seconds.
    """

    counts: EventCounts = field(default_factory=EventCounts)
    lag: RecentMax = field(default_factory=RecentMax)

    def report(self, known: EventCounts, totals: KvEvents, now: float) -> EventCounts:
        """Take in what a session or process has published, of which `known` is counted already.

        Totals that have fallen are old news. Returns what is new, and notes that it is known.
        """
        new = EventCounts(
            kv_events=max(0, totals.published - known.kv_events),
            kv_event_snapshots=max(0, totals.snapshots - known.kv_event_snapshots),
            kv_event_overruns=max(0, totals.overruns - known.kv_event_overruns),
        )
        known.add(new)
        self.counts.add(new)
        self.lag.observe(totals.lag_us / 1e6, now)
        return new


@dataclass(slots=True)
class Publisher:
    """The daemon's own publisher, whose process may be replaced; where it is switched on.

    address: where subscribers find it.
    pid: of its process; 0 while there is none that serves.
    subscriptions, topics: that it has now.
    restarts: processes that were lost.
    last_error: how the last of them ended.
    """

    address: str
    pid: int = 0
    subscriptions: int = 0
    topics: int = 0
    restarts: int = 0
    last_error: str = ""
    published: Published = field(default_factory=Published)
    _known: EventCounts = field(default_factory=EventCounts)  # of the process that serves now

    @property
    def state(self) -> str:
        """`up`, `starting` (it never was up) or `down` (lost, and started again)."""
        if self.pid:
            return "up"
        return "down" if self.restarts else "starting"

    def started(self, pid: int) -> None:
        """A process serves from now on, and counts from zero."""
        self.pid, self._known = pid, EventCounts()

    def lost(self, how: str) -> None:
        """The process has ended."""
        self.pid, self.last_error = 0, how
        self.subscriptions = self.topics = 0
        self.restarts += 1

    def report(self, totals: KvEvents, now: float) -> None:
        """The process tells what it has published since it started; `lag_us` since last time."""
        self.published.report(self._known, totals, now)
