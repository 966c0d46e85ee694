"""The status page's files, read once: three small files that never change while kvd runs."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}


def page_routes(folder: Path = _FOLDER) -> list[Route]:
    """A route for each file of the page: ``/static/<name>``, and ``/`` for index.html."""
    routes = []
    for path in sorted(folder.glob("*")):
        kind = _TYPES.get(path.suffix)
        if kind is None:
            continue
        where = "/" if path.name == "index.html" else f"/static/{path.name}"
        routes.append(_route(where, path.read_bytes(), kind))
    return routes


def _route(where: str, body: bytes, kind: str) -> Route:
    async def serve(request: Request) -> Response:  # a coroutine needs no thread
        del request
        return Response(body, media_type=kind, headers={"cache-control": "no-cache"})

    return Route(where, serve)
