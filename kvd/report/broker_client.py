"""The HTTP process's connection to the broker, and samples of its reports.

The connection is a tool's session, served by the loop that serves engines, so an answer shows that
this path works. One request of a kind is under way at a time; its answer is shared by all callers.
A broker that hangs gets no second request of the kind before it has answered.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvd.errors import NotRunning, Refusal
from kvd.machine.process import stopped_text
from kvd.metrics.reading import Report
from kvd.wire.tool import ToolConnection
from kvd_proto.messages import Message, Ping, Pong, Status, StatusReport

CONNECT_SECONDS = 5.0
GIVE_UP_SECONDS = 300.0  # then the client connects anew
FRESH_SECONDS = 0.5
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


class BrokerClient:
    """Sends requests to the broker, with deadlines.

    Args:
        runtime_dir: of the daemon.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._connection: ToolConnection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvd-ask")
        self._under_way: dict[type[Message], asyncio.Task[Message]] = {}
        self._report: dict[str, Any] = {}
        self._report_at = float("-inf")
        self.silent_since: float | None = None
        """Unix time since which the broker does not answer; None: no request waits or has failed.

        It is the time of its latest answer, or of the first request since it had none to answer.
        """

    @property
    def last_report(self) -> dict[str, Any] | None:
        """The newest report, whatever its age; None before the first."""
        return self._report or None

    async def ping(self, seconds: float) -> float:
        """Return the seconds until the broker answered a PING, this one or one under way.

        Raises:
            NotRunning: no answer within `seconds`.
        """
        started = time.monotonic()
        await self._ask_shared(Ping(), Pong, seconds)
        return time.monotonic() - started

    async def report(self, seconds: float) -> dict[str, Any]:
        """Return the broker's report, at most `FRESH_SECONDS` old.

        Raises:
            NotRunning: no answer within `seconds`.
        """
        if time.monotonic() - self._report_at > FRESH_SECONDS:
            reply = await self._ask_shared(Status(), StatusReport, seconds)
            if isinstance(reply, StatusReport) and reply.status is not self._report:
                self._report = reply.status
                self._report_at = time.monotonic()
        return self._report

    async def _ask_shared(
        self, message: Message, reply_type: type[Message], seconds: float
    ) -> Message:
        """Return the reply to the request of this type that is under way, or to a new one.

        Raises:
            NotRunning: no reply within `seconds`.
        """
        task = self._under_way.get(type(message))
        if task is None:
            task = asyncio.create_task(self._exchange(message, reply_type))
            self._under_way[type(message)] = task
            # Retrieve its error: asyncio would log it if all callers had timed out.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            silent = time.time() - (self.silent_since or time.time())
            stopped = stopped_text(os.getppid())  # the broker's process
            cause = (
                f": {stopped}; let it go on with kill -CONT"
                if stopped
                else ". Its log says what it does; if it stays silent, restart the daemon"
            )
            raise NotRunning(
                f"the broker has not answered {type(message).__name__} within {seconds:g} s; it has"
                f" been silent for {max(silent, seconds):.1f} s{cause}"
            ) from None

    async def _exchange(self, message: Message, reply_type: type[Message]) -> Message:
        self.silent_since = self.silent_since or time.time()
        loop = asyncio.get_running_loop()
        try:
            reply = await loop.run_in_executor(
                self._thread, self._request_blocking, message, reply_type
            )
        finally:
            del self._under_way[type(message)]
        self.silent_since = time.time() if self._under_way else None
        return reply

    def _request_blocking(self, message: Message, reply_type: type[Message]) -> Message:
        """Send a request and return its reply; connect if needed.

        Runs in `_thread`. A refusal, too, is NotRunning.
        """
        try:
            if self._connection is None:
                self._connection = ToolConnection(self._runtime_dir, CONNECT_SECONDS)
            return self._connection.ask(message, reply_type, GIVE_UP_SECONDS)
        except (Refusal, NotRunning) as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if isinstance(error, Refusal):
                raise NotRunning(f"the daemon refused ({error.code}): {error}") from error
            raise


class Samples:
    """Counters of the last ten minutes, and reports of the last minute.

    At most `KEEP_SECONDS / PERIOD_SECONDS` samples and `MAX_REPORTS` reports. All are of one boot:
    this process ends with its broker.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, ...]] = deque(maxlen=int(KEEP_SECONDS / PERIOD_SECONDS))
        self._reports: deque[Report] = deque(maxlen=MAX_REPORTS)

    def add(self, report: Report) -> None:
        """Keep a report's counters, and every `REPORT_PERIOD_SECONDS` the report."""
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

    def history(self) -> dict[str, Any]:
        """Return the content of `/history`.

        samples: oldest first, each the unix time and the counters in the order of `fields`.
        report: the oldest one kept; null if there is none.
        """
        report = self._reports[0] if self._reports else None
        return {"fields": FIELDS, "samples": list(self._samples), "report": report}
