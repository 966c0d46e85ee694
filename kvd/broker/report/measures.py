"""What the broker measures for its reports: its own loop, the pool's progress, lookups."""

from collections import deque

from kvd.metrics.counts import LookupCounts
from kvd_proto.messages import Lookups

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

    def __repr__(self) -> str:
        return f"<RecentMax of {len(self._greatest)} values>"


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

    def __repr__(self) -> str:
        return f"<Progress {list(self._samples)[-1:]}>"


def new_lookups(known: LookupCounts, reported: Lookups) -> LookupCounts:
    """Return what a session has looked up since its last report, and note that it is `known`.

    A scheduler reports totals of its session now and then; the difference is what is new, so
    nothing counts twice however often it is reported. Totals that have fallen are old news.
    """
    new = LookupCounts(
        lookup_chunks=max(0, reported.chunks - known.lookup_chunks),
        hit_chunks=max(0, reported.hit_chunks - known.hit_chunks),
        lookup_tokens=max(0, (reported.tokens or 0) - known.lookup_tokens),
        hit_tokens=max(0, (reported.hit_tokens or 0) - known.hit_tokens),
        aborted_requests=max(0, reported.aborted_requests - known.aborted_requests),
        detached_tokens=max(0, reported.detached_tokens - known.detached_tokens),
        hints=max(0, reported.hints - known.hints),
        hints_ignored=max(0, reported.hints_ignored - known.hints_ignored),
        hints_cut=max(0, reported.hints_cut - known.hints_cut),
    )
    known.add(new)
    return new
