"""What holds for every request: only reading, only our own names, nothing for other sites."""

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvd.report.http.hosts import Hosts
from kvd.report.http.traffic import Traffic

_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Guard:
    """Refuses what is no reading by a client of ours; adds the security headers; counts.

    Args:
        app: what serves the rest.
        hosts: names that TCP clients may use; the Unix socket has none.
        routes: paths that are counted by name.
        traffic: where answers are counted.
    """

    def __init__(
        self, app: ASGIApp, hosts: Hosts, routes: Collection[str], traffic: Traffic
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._routes = routes
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        route = scope["path"] if scope["path"] in self._routes else "other"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._traffic.requests[route, message["status"]] += 1
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        if scope["client"] is not None and not self._hosts.allow(headers.get("host", "localhost")):
            return PlainTextResponse(
                f"This server is not called {headers['host']!r}; use its address, or localhost.\n",
                421,
            )
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse(
                "Only GET and HEAD are served here; to change something use the kvd command.\n",
                405,
                {"allow": "GET, HEAD"},
            )
        return None

    def __repr__(self) -> str:
        return f"<Guard {self._hosts!r}>"
