"""One HTTP connection: uvicorn's, with a deadline on everything that a client may let hang."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 5.0
WRITE_SECONDS = 5.0
MAX_CONNECTIONS = 128


class Connection(H11Protocol):
    """A connection that is closed when a request does not arrive or an answer is not read in time.

    Each listener has room for `MAX_CONNECTIONS`; beyond that the oldest one
    without a request in progress makes room, so that idle clients keep nobody
    out, and a crowd on the TCP port never reaches the Unix socket.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Let it in, and wait for its request."""
        super().connection_made(transport)
        same = [c for c in self.connections if isinstance(c, Connection) and self._beside(c)]
        if len(same) > MAX_CONNECTIONS:
            idle = [c for c in same if not c.busy and c is not self]
            min(idle or [self], key=lambda c: c._since).transport.abort()  # noqa: SLF001  # another of this class
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Take bytes; while they are no whole request the deadline stays."""
        super().data_received(data)
        if self.busy:
            self._cancel("_request_timer")
        elif self._request_timer is None:
            self._expect_request()

    def on_response_complete(self) -> None:
        """Between two requests uvicorn's own, shorter deadline holds."""
        self._cancel("_request_timer")
        self._since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also where its client does not read what is left."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """The client reads too slowly; it has a while to catch up."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._cancel("_write_timer")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        super().connection_lost(exc)
        self._cancel("_request_timer")
        self._cancel("_write_timer")

    def _expect_request(self) -> None:
        self._request_timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _beside(self, other: "Connection") -> bool:
        """On the same listener (only TCP tells clients apart by address), and not closing."""
        same = (self.client is None) == (other.client is None)
        return same and not other.transport.is_closing()

    def _cancel(self, name: str) -> None:
        timer = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)
