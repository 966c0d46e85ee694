"""What a scrape gets: the report's metrics, and HTTP's own, which need no broker."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from kvd.report.http.families import counter, gauge
from kvd.report.http.metrics import families
from kvd.report.http.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Exposition:
    """One scrape's answer, in the shape of a registry.

    report: None where the broker has not answered; silent_seconds: for how long it has not.
    """

    report: Mapping[str, Any] | None
    silent_seconds: float
    traffic: Traffic

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        text = "1 if the broker answered in time; else all that it would tell is missing here."
        yield gauge("kvd_up", text, [((), self.report is not None)])
        text = "Time for which the broker has owed an answer; 0 if it owes none."
        yield gauge("kvd_broker_silent_seconds", text, [((), self.silent_seconds)])
        if self.report is not None:
            yield from families(self.report)
        requests = [((path, str(code)), n) for (path, code), n in self.traffic.requests.items()]
        text = "Answers over HTTP since its process began, by path and status."
        yield counter("kvd_http_requests_total", text, requests, ["path", "code"])
        text = "Open event streams: pages that are being watched."
        yield gauge("kvd_http_watchers", text, [((), self.traffic.watchers)])
        text = "CPU time of the process that answers here."
        yield counter("kvd_http_cpu_seconds_total", text, [((), time.process_time())])

    def encode(self, accept: str) -> tuple[bytes, str]:
        """The text in the format that the client prefers, and its content type."""
        encoder, kind = choose_encoder(accept)
        return encoder(self), kind
