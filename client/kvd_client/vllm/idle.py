"""Publishes, for an engine without requests, what other engines change in the pool.

vLLM publishes KV events at the end of a step. An engine without requests waits in its input queue
and takes no steps. `EngineCoreRequestType.WAKEUP`, a message of vLLM's own, makes it ask its
connector whether there is work: the connector publishes, in the engine's thread, and returns
False. A step would do as well, but each one keeps vLLM's workers in a busy loop for a second.
"""

import inspect
import threading
import time
from collections.abc import Callable, Iterable

from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from kvd_client.errors import get_logger
from kvd_client.vllm.upstream import require

log = get_logger("kvd_client.vllm")

_FAILED = "publishing without steps failed and is off; this engine publishes in its steps only"

IDLE_SECONDS = 1.0
"""Seconds between two publications of an idle engine."""

POLL_SECONDS = 0.2
"""Seconds between two checks for waiting changes."""

CLOSE_SECONDS = 1.0


class IdlePublisher:
    """Publishes one engine's pool events outside steps, and wakes the engine for it.

    Args:
        core: the engine.
        is_due: whether something waits to be published; called from any thread.
        take_events: returns it, in the engine's thread; raises nothing.
    """

    def __init__(
        self,
        core: EngineCoreProc,
        is_due: Callable[[], bool],
        take_events: Callable[[], Iterable[KVCacheEvent]],
    ) -> None:
        self._core = core
        self._is_due = is_due
        self._take_events = take_events
        self._is_woken = False  # a WAKEUP is queued, or the engine has requests since
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-idle-publisher", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Publish a bounded part of what waits, after the engine's own events.

        Called in the engine's thread whenever it has no requests. If more waits, the engine is
        woken again, so that requests in between are served first.
        """
        if self._closed.is_set():
            return
        self._is_woken = False
        try:
            if not self._is_due():
                return
            scheduler = self._core.scheduler
            events = [*scheduler.kv_cache_manager.take_events(), *self._take_events()]
            if events:
                scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
            if self._is_due():
                self._wake()
        except Exception:
            log.exception(_FAILED)
            self._closed.set()

    def close(self) -> None:
        """End the thread. May be called again."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closed.wait(POLL_SECONDS):
                if not self._is_woken and self._is_due():
                    self._wake()
        except Exception:
            log.exception(_FAILED)
            self._closed.set()

    def _wake(self) -> None:
        if not self._closed.is_set():
            self._is_woken = True
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def calling_engine_core() -> EngineCoreProc | None:
    """Return the engine whose constructor is running, as it is while vLLM makes a connector.

    Returns:
        None for an engine within its caller's process: it runs only when its caller says so.

    Raises:
        UnsupportedVllm: the engine has no input queue.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, EngineCoreProc):
            require(caller, "input_queue")
            return caller
        frame = frame.f_back
    return None
