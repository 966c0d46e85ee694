"""What a page that was just opened shows of the time before: counters, and a report."""

import asyncio
import contextlib
from collections import deque
from typing import Any

from kvd.errors import NotRunning
from kvd.metrics.history import Report
from kvd.report.broker_client import BrokerClient

PERIOD_SECONDS = 5.0
KEEP_SECONDS = 600.0
REPORT_PERIOD_SECONDS, MAX_REPORTS = 15.0, 4
FIELDS = (
    "load_bytes",
    "store_bytes",
    "lookup_tokens",
    "hit_tokens",
    "lookup_chunks",
    "hit_chunks",
)
"""Counters of the report that a chart shows."""
_ANSWER_SECONDS = 2.0


class Samples:
    """Counters of the last ten minutes, and whole reports of the last one.

    At most `KEEP_SECONDS / PERIOD_SECONDS` samples and `MAX_REPORTS` reports. All are of one boot:
    this process ends with its broker.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, ...]] = deque(maxlen=int(KEEP_SECONDS / PERIOD_SECONDS))
        self._reports: deque[Report] = deque(maxlen=MAX_REPORTS)

    def add(self, report: Report) -> None:
        """Keep a report's counters, and now and then the report."""
        time, counters = report["time"], report["counters"]
        self._samples.append((time, *(counters[field] for field in FIELDS)))
        if not self._reports or time - self._reports[-1]["time"] >= REPORT_PERIOD_SECONDS:
            self._reports.append(report)

    async def record(self, broker: BrokerClient) -> None:
        """Add a sample every `PERIOD_SECONDS`, until cancelled; none while the broker is silent."""
        while True:
            with contextlib.suppress(NotRunning):
                self.add(await broker.report(_ANSWER_SECONDS))
            await asyncio.sleep(PERIOD_SECONDS)

    def told(self) -> dict[str, Any]:
        """Return what `/history` answers.

        samples: oldest first, each the unix time and the counters in the order of `fields`.
        report: the oldest one that is kept; null where there is none.
        """
        report = self._reports[0] if self._reports else None
        return {"fields": FIELDS, "samples": list(self._samples), "report": report}

    def __repr__(self) -> str:
        return f"<Samples {len(self._samples)}, {len(self._reports)} reports>"
