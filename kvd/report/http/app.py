"""The routes."""

import json
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvd.errors import NotRunning
from kvd.report.http import health
from kvd.report.http.broker_client import Asking
from kvd.report.http.exposition import Exposition
from kvd.report.http.guard import Guard
from kvd.report.http.health import Check
from kvd.report.http.live import Events
from kvd.report.http.page import page_routes

ANSWER_SECONDS = 2.0
SCRAPE_SECONDS = 1.0
LONGEST_ANSWER_SECONDS = 30.0


class App:
    """What each path answers.

    Args:
        asking: the connection to the broker.
    """

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._events = Events(asking)
        routes = [
            Route("/livez", self.livez),
            Route("/healthz", self.livez),
            Route("/readyz", self.readyz),
            Route("/status", self.status),
            Route("/metrics", self.metrics),
            Route("/events", self.events),
            *page_routes(),
        ]
        self._paths = [route.path for route in routes]
        self._router = Router(routes, redirect_slashes=False, default=self._unknown)

    def guarded(self, host: str) -> ASGIApp:
        """Return the whole application, for a server that listens on `host`."""
        return Guard(self._router, host, frozenset(self._paths))

    async def livez(self, request: Request) -> Response:
        """Does the broker's loop turn? A PING through the socket that engines use."""
        seconds = _deadline(request)
        if seconds is None:
            return _bad_deadline()
        try:
            checks = [health.broker_check(await self._asking.ping(seconds))]
            if _wants_all(request):
                checks += health.lane_lines(await self._asking.report(seconds))
        except NotRunning as error:
            checks = [health.broker_check(None, str(error))]
        return _probe(request, "livez", checks)

    async def readyz(self, request: Request) -> Response:
        """Can engines store and load now? The daemon's own checks."""
        seconds = _deadline(request)
        if seconds is None:
            return _bad_deadline()
        try:
            report = await self._asking.report(seconds)
        except NotRunning as error:
            return _probe(request, "readyz", [health.broker_check(None, str(error))])
        checks = health.readiness(report)
        if _wants_all(request):
            checks += health.lane_lines(report)
        return _probe(request, "readyz", checks)

    async def status(self, request: Request) -> Response:
        """The report, as `kvd status --json` prints it."""
        del request
        try:
            return _json(await self._asking.report(ANSWER_SECONDS), 200)
        except NotRunning as error:
            return _json({"error": str(error), "since": self._asking.silent_since}, 503)

    async def metrics(self, request: Request) -> Response:
        """The report for Prometheus; without the broker, what is known without it."""
        report, silent = None, 0.0
        try:
            report = await self._asking.report(SCRAPE_SECONDS)
        except NotRunning:
            silent = time.time() - (self._asking.silent_since or time.time())
        accept = Headers(scope=request.scope).get("accept", "")
        body, kind = Exposition(report, silent).encode(accept)
        return Response(body, media_type=None, headers={"content-type": kind})

    async def events(self, request: Request) -> Response:
        """The report, once a second."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._events.full:
            return PlainTextResponse(
                "Too many watch already; close another page, or ask /status now and then.\n",
                503,
                {"retry-after": "10"},
            )
        return StreamingResponse(self._events.watch(), media_type="text/event-stream")

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        paths = [path for path in self._paths if not path.startswith("/static/")]
        text = f"There is nothing here; there is {', '.join(paths)}.\n"
        await PlainTextResponse(text, 404)(scope, receive, send)

    def __repr__(self) -> str:
        return f"<App {' '.join(self._paths)}>"


def _deadline(request: Request) -> float | None:
    """Seconds that the client gives the broker; None where they make no sense."""
    text = request.query_params.get("timeout", str(ANSWER_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= LONGEST_ANSWER_SECONDS else None


def _bad_deadline() -> Response:
    return PlainTextResponse(
        f"timeout is in seconds, above 0 and at most {LONGEST_ANSWER_SECONDS:g}.\n", 400
    )


def _wants_json(request: Request) -> bool:
    accepted = Headers(scope=request.scope).get("accept", "")
    return request.query_params.get("format") == "json" or "application/json" in accepted


def _wants_all(request: Request) -> bool:
    return "verbose" in request.query_params or _wants_json(request)


def _probe(request: Request, probe: str, checks: list[Check]) -> Response:
    status = 200 if health.passed(checks) else 503
    if _wants_json(request):
        return _json(health.as_json(probe, checks), status)
    text = health.as_text(probe, checks, verbose="verbose" in request.query_params)
    return PlainTextResponse(text, status)


def _json(content: Any, status: int) -> Response:
    body = json.dumps(content, indent=2) + "\n"
    return Response(body, status, media_type="application/json")
