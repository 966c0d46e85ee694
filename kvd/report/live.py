"""Live updates once a second to everybody who watches, as server-sent events.

`report` is the report; `trouble` says that the broker is silent.

While nobody watches, nobody is asked. All watchers share one report; one that
reads slowly skips some. A broker that is silent is an event too.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator

from kvd.errors import NotRunning
from kvd.report.broker_client import BrokerClient
from kvd.report.exposition import WATCHERS

PERIOD_SECONDS = 1.0
ANSWER_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 5.0
MAX_WATCHERS = 32
_START = b"retry: 2000\n\n"  # a browser that loses the stream tries again after 2 s
_KEEP_ALIVE = b": still here\n\n"


class Events:
    """The stream and who reads it."""

    def __init__(self, broker: BrokerClient) -> None:
        self._broker = broker
        self._watchers = 0
        self._latest = b""
        self._number = 0
        self._news = asyncio.Condition()
        self._asker: asyncio.Task[None] | None = None

    @property
    def full(self) -> bool:
        """No further watcher is let in."""
        return self._watchers >= MAX_WATCHERS

    async def watch(self) -> AsyncIterator[bytes]:
        """Frames for one watcher, without end."""
        self._watchers += 1
        WATCHERS.inc()
        if self._asker is None:
            self._asker = asyncio.create_task(self._ask_on())
        try:
            yield _START
            seen = 0
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS), self._news:
                        await self._news.wait_for(lambda: self._number != seen)  # noqa: B023  # called here only
                except TimeoutError:
                    yield _KEEP_ALIVE
                    continue
                seen = self._number
                yield self._latest
        finally:
            self._watchers -= 1
            WATCHERS.dec()
            if not self._watchers and self._asker is not None:
                self._asker.cancel()
                self._asker = None

    async def _ask_on(self) -> None:
        while True:
            started = time.monotonic()
            frame = await self._frame()
            async with self._news:
                self._latest = frame
                self._number += 1
                self._news.notify_all()
            await asyncio.sleep(max(0.0, started + PERIOD_SECONDS - time.monotonic()))

    async def _frame(self) -> bytes:
        try:
            report = await self._broker.report(ANSWER_SECONDS)
        except NotRunning as error:
            now = time.time()
            since = self._broker.silent_since or now
            return _event("trouble", {"time": now, "since": since, "text": str(error)})
        return _event("report", report)

    def __repr__(self) -> str:
        return f"<Events, {self._watchers} watchers>"


def _event(name: str, data: object) -> bytes:
    body = json.dumps(data, separators=(",", ":"))
    return f"event: {name}\ndata: {body}\n\n".encode()
