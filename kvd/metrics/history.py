"""Reports over time: what happened between two of them, and how fast.

Counters only grow while a daemon lives, so that the difference of two reports
of one boot is what happened in between. A new boot starts anew.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

Report = Mapping[str, Any]
Histogram = Mapping[str, Any]


class Span:
    """What happened between two reports of one boot.

    Args:
        now: the later report.
        before: the earlier one; without it nothing is known to have happened.
    """

    def __init__(self, now: Report, before: Report | None = None) -> None:
        self.now = now
        self.before = now if before is None else before
        self.seconds: float = max(0.0, now["time"] - self.before["time"])

    def rise(self, *path: str) -> float:
        """How much the number at `path` of the report has grown; what was not there was 0."""
        return _rise(_at(self.before, path), _at(self.now, path))

    def rate(self, *path: str) -> float | None:
        """Its growth per second; None before a second report has come."""
        return self.rise(*path) / self.seconds if self.seconds else None

    def share(self, part: str, whole: str) -> float | None:
        """Growth of the counter `part` in that of `whole`; None where nothing was counted."""
        total = self.rise("counters", whole)
        return self.rise("counters", part) / total if total else None

    def lane(self, device: str) -> "Span":
        """The same of one lane: both ends are that lane's part of the report."""
        return self._part("lanes", "device", device)

    def engine(self, name: str) -> "Span":
        """The same of one engine."""
        return self._part("engines", "name", name)

    def namespace(self, identity: str) -> "Span":
        """The same of one namespace."""
        return self._part("namespaces", "id", identity)

    def histogram(self, *path: str) -> Histogram | None:
        """What the histogram at `path` has gained; None where the report has none."""
        now, before = _at(self.now, path), _at(self.before, path)
        if now is None or before is None:
            return now  # type: ignore[no-any-return]  # what was not there had counted nothing
        counts = [
            max(0, after - then)
            for after, then in zip(now["counts"], before["counts"], strict=True)
        ]
        return {"bounds": now["bounds"], "counts": counts, "sum": now["sum"] - before["sum"]}

    def _part(self, kind: str, key: str, value: str) -> "Span":
        ends = []
        for report in (self.now, self.before):
            found = [part for part in report[kind] if part[key] == value]
            ends.append({**(found[0] if found else {}), "time": report["time"]})
        return Span(*ends)

    def __repr__(self) -> str:
        return f"<Span of {self.seconds:.1f} s>"


class History:
    """The reports of the last `keep` seconds, all of one boot."""

    def __init__(self, keep: float = 60.0) -> None:
        self._keep = keep
        self._reports: deque[Report] = deque()

    def add(self, report: Report) -> bool:
        """Take a new report; whether the daemon was started anew since the last one."""
        reports = self._reports
        restarted = bool(reports) and reports[-1]["boot_id"] != report["boot_id"]
        if restarted:
            reports.clear()
        reports.append(report)
        while report["time"] - reports[0]["time"] > self._keep:
            reports.popleft()
        return restarted

    @property
    def oldest(self) -> Report | None:
        """The oldest report that is kept; None where there is none."""
        return self._reports[0] if self._reports else None

    def span(self) -> Span:
        """From the oldest report until now.

        Raises:
            IndexError: no report has come yet.
        """
        return Span(self._reports[-1], self._reports[0])

    def rates(self, *path: str) -> list[float]:
        """Growth per second between each two reports in a row, oldest first."""
        spans = (Span(now, before) for before, now in pairwise(self._reports))
        return [rate for span in spans if (rate := span.rate(*path)) is not None]

    def __repr__(self) -> str:
        return f"<History {len(self._reports)} reports>"


def quantile(histogram: Histogram | None, q: float) -> float | None:
    """The value below which a share `q` lies, by straight lines within buckets.

    None if it is empty. What lies above the last bound counts as the last bound.
    """
    if histogram is None or not (total := sum(histogram["counts"])):
        return None
    bounds, want, below = histogram["bounds"], q * total, 0
    for i, count in enumerate(histogram["counts"][: len(bounds)]):
        if count and below + count >= want:
            low = bounds[i - 1] if i else 0.0
            return float(low + (bounds[i] - low) * max(0.0, want - below) / count)
        below += count
    return float(bounds[-1])


def merged(histograms: Iterable[Histogram | None]) -> Histogram | None:
    """The sum of histograms with the same bounds; None where there is none."""
    present = [histogram for histogram in histograms if histogram is not None]
    if not present:
        return None
    counts = zip(*(one["counts"] for one in present), strict=True)
    return {
        "bounds": present[0]["bounds"],
        "counts": [sum(each) for each in counts],
        "sum": sum(one["sum"] for one in present),
    }


def _at(report: Report, path: tuple[str, ...]) -> Any:
    found: Any = report
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def _rise(before: Any, now: Any) -> float:
    return max(0.0, float((now or 0) - (before or 0)))
