"""HTTP: routes, bounds on connections, host names and headers, and the metrics of a scrape.

Every metric of the report is declared with its field in `kvd.metrics`. Totals of the daemon and of
its parts have different names: a sum never counts twice, and a total never falls when a part
leaves. Labels are few: never keys, never process ids.
"""

import asyncio
import contextlib
import ipaddress
import json
import math
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvd.config.values import ListenAddress
from kvd.errors import NotRunning
from kvd.metrics.declare import ReportField
from kvd.metrics.schema import REPORT_FIELDS, CheckStatus
from kvd.report.broker_client import BrokerClient, Samples

MAX_CONNECTIONS = 128
_UNREAD_MS = 5000
ANSWER_SECONDS = 2.0
SCRAPE_SECONDS = 1.0
LONGEST_ANSWER_SECONDS = 30.0
PERIOD_SECONDS = 1.0
SHARED_SECONDS = 0.1
MAX_WATCHERS = 32
_METRICS_TYPES = (
    "text/plain; version=0.0.4;",
    "text/plain; version=1.0.0;",
    "application/openmetrics-text; version=1.0.0;",
)
_PAGE = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

disable_created_metrics()  # type: ignore[no-untyped-call]  # as the library has it
REQUESTS = Counter(
    "kvd_http_requests_total",
    "Answers over HTTP since its process began, by path and status.",
    ["path", "code"],
    registry=None,
)
WATCHERS = Gauge(
    "kvd_http_watchers", "Open event streams: pages that are being watched.", registry=None
)

SHARED_METRICS = {
    "store_answered_chunks_total": "Chunks that engines asked to store, by answer: accepted, there"
    " already (present), being written (pending), or refused.",
    "load_answered_chunks_total": "Chunks that engines asked to load, by whether they were found.",
    "descriptions_dropped_total": "Descriptions of stored chunks that are not kept, so that routers"
    " learn neither token ids nor parent of these chunks.",
    "bytes_total": "Bytes of chunks that a tier kept (put) and gave back (get).",
    "kvd_tier_queued_bytes": "Bytes of chunks on their way down to a tier (put) and up (get).",
    "busy_seconds_total": "Time in which puts or gets of a tier were under way, one or several.",
    "evicted_chunks_total": "Chunks evicted to make room for others.",
    "removed_chunks_total": "Stored chunks dropped because an engine reset them or an operator"
    " cleared them.",
    "copied_bytes_total": "Bytes copied between engines and pool.",
    "copy_seconds_total": "Time in which bytes were being copied.",
    "lane_dropped_messages_total": "Messages that the lane could not read, and replies that no"
    " worker took.",
}
"""The meaning of metrics that are made from several counters."""
METRICS: dict[str, list[ReportField]] = defaultdict(list)
"""Fields of the report by metric."""
for _field in REPORT_FIELDS:
    if _field.metric:
        METRICS[_field.metric].append(_field)


class HttpListener(socket.socket):
    """A listening socket; beyond `MAX_CONNECTIONS` the oldest connection is closed.

    Idle or slow clients do not keep others out, and a flood on the TCP port does not reach the Unix
    socket. Over TCP the kernel also ends a connection whose client reads nothing for 5 s.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fileno=fd)
        self._accepted: list[socket.socket] = []
        if self.family != socket.AF_UNIX:  # accepted connections inherit it
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; the caller closes it."""
        connection, address = super().accept()
        self._accepted = [accepted for accepted in self._accepted if accepted.fileno() >= 0]
        self._accepted.append(connection)
        if len(self._accepted) > MAX_CONNECTIONS:
            with contextlib.suppress(OSError):  # its client has gone
                self._accepted.pop(0).shutdown(socket.SHUT_RDWR)
        return connection, address


class Guard:
    """Middleware: refuses foreign host names, adds security headers, counts answers.

    A foreign web page can point its own name at this machine (DNS rebinding), and the browser would
    let it read the answers. The Host header then carries that name. A numeric address cannot be
    rebound, and only owner and group can use the Unix socket: both are served.

    Args:
        app: the application.
        host: the host that kvd listens on, by its settings.
        routes: paths that are counted by name.
    """

    def __init__(self, app: ASGIApp, host: str, routes: Collection[str]) -> None:
        self._app = app
        names = ["localhost", socket.gethostname() if ListenAddress(host, 0).everywhere else host]
        self._checked_app = TrustedHostMiddleware(app, names, www_redirect=False)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = scope["path"] if scope["path"] in self._routes else "other"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                REQUESTS.labels(route, message["status"]).inc()
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        trusted = scope["client"] is None or _is_address(Headers(scope=scope).get("host", ""))
        await (self._app if trusted else self._checked_app)(scope, receive, send_guarded)


def _is_address(host: str) -> bool:
    """Whether a Host header, with or without a port, is a numeric address."""
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return True


class App:
    """The routes and their handlers.

    Args:
        broker: the connection to the broker.
    """

    def __init__(self, broker: BrokerClient) -> None:
        self._broker = broker
        self._samples = Samples()
        self._watchers = 0
        # Metrics by content type, each with when they were made.
        self._metrics: dict[str, tuple[float, bytes]] = {}
        routes = [
            Route("/livez", self.probe),
            Route("/healthz", self.probe),
            Route("/readyz", self.probe),
            Route("/status", self.status),
            Route("/metrics", self.metrics),
            Route("/events", self.events),
            Route("/history", self.history),
            *(Route(*_file(path)) for path in sorted(_PAGE.iterdir())),
        ]
        self._paths = [route.path for route in routes]
        self._router = Router(routes, redirect_slashes=False, default=self._unknown)

    def guarded(self, host: str) -> ASGIApp:
        """Return the whole application, for a server that listens on `host`."""
        return Guard(self._router, host, frozenset(self._paths))

    async def record(self) -> None:
        """Keep samples for `/history`, until cancelled."""
        await self._samples.record(self._broker)

    async def probe(self, request: Request) -> Response:
        """Pass, or fail with 503 and the reasons, as text or JSON.

        /readyz: can engines store and load now? By the daemon's checks; a missing engine fails
        none. /livez, /healthz: does the broker's loop turn? By a PING through the engines' socket.
        """
        seconds = _deadline(request)
        if seconds is None:
            text = f"timeout is in seconds, above 0 and at most {LONGEST_ANSWER_SECONDS:g}.\n"
            return PlainTextResponse(text, 400)
        probe = "readyz" if request.url.path == "/readyz" else "livez"
        try:
            if probe == "readyz":
                report = await self._broker.report(seconds)
                checks = [CheckStatus(**check) for check in report["checks"]]
            else:
                latency = await self._broker.ping(seconds)
                text = f"answered a PING in {1e3 * latency:.1f} ms"
                checks = [CheckStatus("broker", ok=True, text=text)]
        except NotRunning as error:
            checks = [CheckStatus("broker", ok=False, text=str(error))]
        failed = [check for check in checks if not check.ok]
        status = 503 if failed else 200
        accepted = Headers(scope=request.scope).get("accept", "")
        if request.query_params.get("format") == "json" or "application/json" in accepted:
            content = {"probe": probe, "ok": not failed, "checks": list(map(asdict, checks))}
            return _json(content, status)
        if "verbose" in request.query_params:
            lines = [f"[{'+' if check.ok else '-'}] {check}" for check in checks]
            lines.append(f"{probe} {'failed' if failed else 'ok'}")
        else:
            lines = [f"failed: {'; '.join(map(str, failed))}" if failed else "ok"]
        return PlainTextResponse("\n".join(lines) + "\n", status)

    async def status(self, request: Request) -> Response:
        """Return the report, as `kvd status --json` prints it, with its age in a header.

        If the broker is silent: 503, the reason, and the last report.
        """
        del request
        try:
            response = _json(await self._broker.report(ANSWER_SECONDS), 200)
        except NotRunning as error:
            silence = {"error": str(error), "since": self._broker.silent_since}
            response = _json(silence | {"last_report": self._broker.last_report}, 503)
        if (report := self._broker.last_report) is not None:
            response.headers["age"] = str(_age(report))
        return response

    async def metrics(self, request: Request) -> Response:
        """Return the metrics for Prometheus; if the broker is silent, only the HTTP process's.

        They are made every `SHARED_SECONDS` at most, and shared.
        """
        encoder, kind = choose_encoder(Headers(scope=request.scope).get("accept", ""))
        if not kind.startswith(_METRICS_TYPES):  # the version is the client's
            encoder, kind = choose_encoder("")
        report, silent = None, 0.0
        try:
            report = await self._broker.report(SCRAPE_SECONDS)
        except NotRunning:
            silent = time.time() - (self._broker.silent_since or time.time())
        made_at, body = self._metrics.get(kind, (-math.inf, b""))
        if time.monotonic() - made_at >= SHARED_SECONDS:
            body = encoder(Exposition(report, silent))
            self._metrics[kind] = time.monotonic(), body
        return Response(body, media_type=None, headers={"content-type": kind})

    async def events(self, request: Request) -> Response:
        """Stream the report once a second, or the broker's trouble, to at most `MAX_WATCHERS`."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._watchers >= MAX_WATCHERS:
            return PlainTextResponse(
                f"{MAX_WATCHERS} event streams are open, no more are allowed; close another page,"
                " or poll /status.\n",
                503,
                {"retry-after": "10"},
            )
        return StreamingResponse(self._watch(), media_type="text/event-stream")

    async def history(self, request: Request) -> Response:
        """Return what a page shows of the time before it was opened; see `Samples.history`."""
        del request
        return Response(_compact(self._samples.history()), media_type="application/json")

    async def _watch(self) -> AsyncIterator[str]:
        """Yield a report, or why there is none, each period: one event stream of the page."""
        self._watchers += 1
        WATCHERS.inc()
        first = True
        try:
            yield "retry: 2000\n\n"  # a browser that loses the stream tries again after 2 s
            while True:
                data: dict[str, Any]
                try:  # simultaneous watchers share a report
                    event, data = "report", await self._broker.report(ANSWER_SECONDS)
                except NotRunning as error:
                    event, now = "trouble", time.time()
                    since = self._broker.silent_since or now
                    data = {"time": now, "since": since, "text": str(error)}
                    if first:  # a page that has just opened has nothing to show
                        data["last_report"] = self._broker.last_report
                first = False
                yield f"event: {event}\ndata: {_compact(data)}\n\n"
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            self._watchers -= 1
            WATCHERS.dec()

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        paths = [path for path in self._paths if not path.startswith("/static/")]
        text = f"No such path; there are {', '.join(paths)}.\n"
        await PlainTextResponse(text, 404)(scope, receive, send)


def _deadline(request: Request) -> float | None:
    """Return the client's timeout in seconds; None if it is invalid."""
    text = request.query_params.get("timeout", str(ANSWER_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= LONGEST_ANSWER_SECONDS else None


def _age(report: Mapping[str, Any]) -> int:
    """Return how many seconds ago the report was made."""
    return max(0, int(time.time() - report["time"]))


def _compact(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _json(content: Any, status: int) -> Response:
    body = json.dumps(content, indent=2) + "\n"
    return Response(body, status, media_type="application/json")


def _file(path: Path) -> tuple[str, Callable[[Request], Awaitable[Response]]]:
    """Return the path and the handler of a file of the status page, which is read once."""
    body, kind = path.read_bytes(), _TYPES[path.suffix]

    async def serve(_: Request) -> Response:  # a coroutine needs no thread
        return Response(body, media_type=kind, headers={"cache-control": "no-cache"})

    return "/" if path.name == "index.html" else f"/static/{path.name}", serve


# ------------------------------------------------------------------- metrics


def families(report: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield every metric family that is computed from the report."""
    for name, report_fields in METRICS.items():
        first = report_fields[0]
        samples: dict[tuple[str, ...], Any] = {}
        for field in report_fields:
            for labels, value in field.samples(report):
                samples[labels] = samples[labels] + value if labels in samples else value
        text = SHARED_METRICS.get(first.declaration.metric, first.declaration.text)
        yield _family(name, text, first, samples)


def _family(
    name: str, text: str, field: ReportField, samples: Mapping[tuple[str, ...], Any]
) -> Metric:
    """Return a metric with all of its samples, as prometheus_client has them."""
    if field.declaration.kind == "histogram":
        histogram = HistogramMetricFamily(name, text, labels=field.label_names)
        for labels, value in samples.items():
            bounds = [*map(str, value["bounds"]), "+Inf"]
            buckets = list(zip(bounds, accumulate(value["counts"]), strict=True))
            histogram.add_metric(labels, buckets, value["sum"])
        return histogram
    kind = CounterMetricFamily if field.declaration.kind == "counter" else GaugeMetricFamily
    family = kind(name, text, labels=field.label_names)
    for labels, value in samples.items():
        if field.declaration.kind == "info":
            family.add_metric((*labels, value), 1)
        else:
            family.add_metric(labels, value)
    return family


@dataclass(frozen=True, slots=True)
class Exposition:
    """The metrics of one scrape, as a registry of prometheus_client.

    report: None if the broker has not answered for `silent_seconds`.
    """

    report: Mapping[str, Any] | None
    silent_seconds: float

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        text = "1 if the broker answered in time; else all that it would tell is missing here."
        yield GaugeMetricFamily("kvd_up", text, self.report is not None)
        text = "Time for which the broker has owed an answer; 0 if it owes none."
        yield GaugeMetricFamily("kvd_broker_silent_seconds", text, self.silent_seconds)
        if self.report is not None:
            yield from families(self.report)
        yield from REQUESTS.collect()
        yield from WATCHERS.collect()
        text = "CPU time of the process that answers here."
        yield CounterMetricFamily("kvd_http_cpu_seconds_total", text, time.process_time())
