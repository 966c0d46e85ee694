"""Reports over time: what happened between two of them, and how fast.

Counters only grow while a daemon lives, so that the difference of two reports
of one boot is what happened in between. A new boot starts anew.
"""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from kvd.metrics.declare import Histogram

Report = Mapping[str, Any]
_NAMES = {"lanes": "device", "engines": "name", "namespaces": "id", "tiers": "name"}


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

    def parts(self, kind: str) -> list["Span"]:
        """The same of each item of a list of the report; what was not there had counted nothing."""
        before = {part[_NAMES[kind]]: part for part in self.before[kind]}
        ends = {"now": self.now["time"], "before": self.before["time"]}
        return [
            Span(
                {**part, "time": ends["now"]},
                {**before.get(part[_NAMES[kind]], {}), "time": ends["before"]},
            )
            for part in self.now[kind]
        ]

    def histogram(self, *path: str) -> Histogram:
        """What the histogram at `path` has gained; an empty one where the report has none."""
        now, before = (_at(report, path) for report in (self.now, self.before))
        if now is None:
            return Histogram(())
        return Histogram(**now) if before is None else Histogram(**now).since(Histogram(**before))


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


def _at(report: Report, path: tuple[str, ...]) -> Any:
    found: Any = report
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def _rise(before: Any, now: Any) -> float:
    return max(0.0, float((now or 0) - (before or 0)))
