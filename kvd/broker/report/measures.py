"""What the broker measures for its reports: its loop, the pool's progress, engines' figures."""

from collections import deque
from dataclasses import fields
from typing import TypeVar

import msgspec

from kvd.metrics.counts import EventCounts, LookupCounts
from kvd.metrics.declare import Counts
from kvd_proto.messages import KvEvents, Lookups

Counted = TypeVar("Counted", bound=Counts)

WINDOW_SECONDS = 10.0
_APART_SECONDS = 0.1


class RecentMax:
    """The greatest value of the last `seconds`."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        # What is neither older nor less than a later value: times rise, values fall.
        self._greatest: deque[tuple[float, float]] = deque()

    def observe(self, value: float, now: float) -> None:
        """Take a value in; `now` never goes back."""
        while self._greatest and self._greatest[-1][1] <= value:
            self._greatest.pop()
        self._greatest.append((now, value))
        self.get(now)

    def get(self, now: float) -> float:
        """Return the greatest; 0 where there was none."""
        while self._greatest and self._greatest[0][0] <= now - self._seconds:
            self._greatest.popleft()
        return self._greatest[0][1] if self._greatest else 0.0


class Progress:
    """Amounts done over time; the rate is that of the last ten seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def record(self, now: float, done: int) -> None:
        """`done` is done by `now`. Less than before means that it began anew."""
        samples = self._samples
        if samples and done < samples[-1][1]:
            samples.clear()
        if samples and now < samples[-1][0] + _APART_SECONDS:
            return
        samples.append((now, done))
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_SECONDS:
            samples.popleft()

    def seconds_left(self, total: int) -> float | None:
        """Until `total` is done, at the measured rate; None while no rate is known."""
        if not self._samples:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        if last >= total:
            return 0.0
        if end <= begin or last <= first:
            return None
        return (total - last) * (end - begin) / (last - first)


def gained(known: Counted, totals: Counted) -> Counted:
    """Return what a session has counted beyond what is `known`, and note that it is known now.

    A scheduler reports totals of its session now and then, so nothing counts twice however often
    it is reported. Totals below the known ones are from an earlier report and count nothing.
    """
    names = [each.name for each in fields(known)]
    new = type(known)(**{n: max(0, getattr(totals, n) - getattr(known, n)) for n in names})
    known.add(new)
    return new


def lookup_counts(totals: Lookups) -> LookupCounts:
    """Return a session's totals as they are counted: the same fields in the same order."""
    return LookupCounts(*(total or 0 for total in msgspec.structs.astuple(totals)))


def event_counts(totals: KvEvents) -> EventCounts:
    """Return a session's totals as they are counted."""
    return EventCounts(totals.published, totals.snapshots, totals.overruns)
