"""Reading reports: what happened between two of them, and figures and names as short texts.

Counters only grow while a daemon lives, so the difference of two reports of one boot is what
happened in between.
"""

import re
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from kvd.metrics.declare import Histogram
from kvd_proto.text import format_size

Report = Mapping[str, Any]
_ID_FIELDS = {"lanes": "device", "engines": "name", "namespaces": "id", "tiers": "name"}

NOTHING = "\N{EN DASH}"
NAME_LENGTH = 27
_SNAPSHOT = re.compile(r".*/models--(?:[^/]*--)?([^/]+)/snapshots/([0-9a-f]{8})[0-9a-f]*/?")


class Span:
    """What happened between two reports of one boot.

    Args:
        now: the later report.
        before: the earlier report; without it nothing has changed.
    """

    def __init__(self, now: Report, before: Report | None = None) -> None:
        self.now = now
        self.before = now if before is None else before
        self.seconds: float = max(0.0, now["time"] - self.before["time"])

    def rise(self, *path: str) -> float:
        """Return how much the number at `path` has grown; a missing number is 0."""
        before, now = _at(self.before, path), _at(self.now, path)
        return max(0.0, float((now or 0) - (before or 0)))

    def rate(self, *path: str) -> float | None:
        """Return the growth per second of the number at `path`; None before a second report."""
        return self.rise(*path) / self.seconds if self.seconds else None

    def share(self, part: str, total: str) -> float | None:
        """Return the growth of counter `part` over that of `total`; None if `total` stood still."""
        growth = self.rise("counters", total)
        return self.rise("counters", part) / growth if growth else None

    def parts(self, kind: str) -> list["Span"]:
        """Return a span for each item of a list of the later report, such as "lanes".

        An item that the earlier report lacks has counted nothing before.
        """
        id_field = _ID_FIELDS[kind]
        before = {item[id_field]: item for item in self.before[kind]}
        now_time, before_time = self.now["time"], self.before["time"]
        return [
            Span(
                {**item, "time": now_time},
                {**before.get(item[id_field], {}), "time": before_time},
            )
            for item in self.now[kind]
        ]

    def histogram(self, *path: str) -> Histogram:
        """Return the values added to the histogram at `path`; none if there is no histogram."""
        now, before = (_at(report, path) for report in (self.now, self.before))
        if now is None:
            return Histogram(())
        return Histogram(**now) if before is None else Histogram(**now).since(Histogram(**before))


class History:
    """The reports of the last `keep_seconds`, all of one boot."""

    def __init__(self, keep_seconds: float = 60.0) -> None:
        self._keep_seconds = keep_seconds
        self._reports: deque[Report] = deque()

    def add(self, report: Report) -> bool:
        """Add a report; return whether the daemon has restarted since the last one."""
        reports = self._reports
        restarted = bool(reports) and reports[-1]["boot_id"] != report["boot_id"]
        if restarted:
            reports.clear()
        reports.append(report)
        while report["time"] - reports[0]["time"] > self._keep_seconds:
            reports.popleft()
        return restarted

    @property
    def oldest(self) -> Report | None:
        """The oldest report; None if there is none."""
        return self._reports[0] if self._reports else None

    def span(self) -> Span:
        """Return the span from the oldest report to the newest one.

        Raises:
            IndexError: no report has come yet.
        """
        return Span(self._reports[-1], self._reports[0])

    def rates(self, *path: str) -> list[float]:
        """Return the growth per second between consecutive reports, oldest first."""
        spans = (Span(now, before) for before, now in pairwise(self._reports))
        return [rate for span in spans if (rate := span.rate(*path)) is not None]


def _at(report: Report, path: tuple[str, ...]) -> Any:
    value: Any = report
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


# --------------------------------------------------------------------- texts


def size(nbytes: float | None) -> str:
    """`1.5 GiB`."""
    return NOTHING if nbytes is None else format_size(int(nbytes))


def rate(per_second: float | None) -> str:
    """Bytes per second in decimal units, as rates are given: `1.25 GB/s`."""
    if per_second is None:
        return NOTHING
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if per_second >= scale:
            return f"{per_second / scale:.3g} {unit}"
    return f"{per_second:.0f} B/s"


def percent(share: float | None) -> str:
    """`87 %`; a share is between 0 and 1."""
    return NOTHING if share is None else f"{100 * share:.3g} %"


def number(value: float | None) -> str:
    """A count, with thousands apart."""
    return NOTHING if value is None else f"{round(value):,}"


def latency(seconds: float | None) -> str:
    """`85 µs`, `1.2 ms`, `3.4 s`."""
    if seconds is None:
        return NOTHING
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def duration(seconds: float | None, units: int = 2) -> str:
    """`4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: the largest units, one or two."""
    if seconds is None:
        return NOTHING
    remaining = max(0, int(seconds))
    parts = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if remaining >= length:
            parts.append(f"{remaining // length} {unit}")
            remaining %= length
    return " ".join(parts[:units]) or "0 s"


def several(count: float, singular: str, plural: str | None = None) -> str:
    """`1 chunk`, `12 chunks`."""
    word = singular if round(count) == 1 else plural or f"{singular}s"
    return f"{number(count)} {word}"


def shorten(name: str, length: int = NAME_LENGTH) -> str:
    """`vllm-llama-3-…d8f6b5d-x2k4q`: at most `length` characters, the middle left out.

    A path in a Hugging Face cache becomes model and revision first: `Qwen3-8B@6f6073b4`. The
    page's `shorten` (kvd/report/page/words.js) follows the same rule.
    """
    if len(name) <= NAME_LENGTH:
        return name
    name = _SNAPSHOT.sub(r"\1@\2", name)
    if len(name) <= length:
        return name
    head = length // 2
    return f"{name[:head]}…{name[len(name) - (length - head - 1) :]}"
