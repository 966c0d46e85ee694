"""What engines publish as KV events, as their schedulers' Pings report it."""

from dataclasses import dataclass, field

from kvd.broker.report.measures import RecentMax
from kvd.metrics.counts import EventCounts
from kvd_proto.messages import KvEvents


@dataclass(slots=True)
class Published:
    """What an engine has published, in all its sessions together.

    lag: the longest of the last minute, in seconds.
    """

    counts: EventCounts = field(default_factory=EventCounts)
    lag: RecentMax = field(default_factory=RecentMax)

    def report(self, known: EventCounts, totals: KvEvents, now: float) -> EventCounts:
        """Count what a session has published beyond `known`; add it to `known` and return it.

        Totals below `known` are from an earlier report and count nothing.
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
