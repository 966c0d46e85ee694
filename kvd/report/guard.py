"""What holds for every connection and every request: bounds, own names only, security headers."""

import contextlib
import ipaddress
import socket
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvd.config.values import Listen
from kvd.report.exposition import REQUESTS

MAX_CONNECTIONS = 128
_UNREAD_MS = 5000
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Listener(socket.socket):
    """A listening socket; beyond `MAX_CONNECTIONS` the oldest connection is closed.

    So clients that are idle, send slowly or never read do not keep others out,
    and a flood on the TCP port does not reach the Unix socket. Over TCP the kernel
    also ends a connection whose client does not take what is sent for 5 s.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fileno=fd)
        self._accepted: list[socket.socket] = []
        if self.family != socket.AF_UNIX:  # accepted connections inherit it
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; whoever gets it closes it."""
        connection, address = super().accept()
        self._accepted = [each for each in self._accepted if each.fileno() >= 0]
        self._accepted.append(connection)
        if len(self._accepted) > MAX_CONNECTIONS:
            with contextlib.suppress(OSError):  # its client has gone
                self._accepted.pop(0).shutdown(socket.SHUT_RDWR)
        return connection, address


class Guard:
    """Refuses names of others; adds the security headers; counts answers.

    A web page from elsewhere can point a name of its own at this machine (DNS
    rebinding), and the browser would let it read what is served here. The
    Host header then carries that name. An address in figures cannot be rebound,
    and the Unix socket is for owner and group: both are answered.

    Args:
        app: what serves the rest.
        host: what the operator told kvd to listen on.
        routes: paths that are counted by name.
    """

    def __init__(self, app: ASGIApp, host: str, routes: Collection[str]) -> None:
        self._app = app
        names = ["localhost", socket.gethostname() if Listen(host, 0).everywhere else host]
        self._for_names = TrustedHostMiddleware(app, names, www_redirect=False)
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

        local = scope["client"] is None or _is_address(Headers(scope=scope).get("host", ""))
        await (self._app if local else self._for_names)(scope, receive, send_guarded)


def _is_address(host: str) -> bool:
    """Whether a Host header, with or without a port, is an address in figures."""
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return True
