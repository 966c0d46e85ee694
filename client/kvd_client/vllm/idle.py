"""Publishes, for an engine without requests, what other engines change in the pool.

vLLM publishes KV events at the end of a step. An engine without requests waits in its input queue
and takes no steps. `EngineCoreRequestType.WAKEUP`, a message of vLLM's own, makes it ask its
connector whether there is work: the connector then publishes, in the engine's thread, and says no.
A step would do as well, but each one keeps vLLM's workers busy for a second.
"""

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable

from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

log = logging.getLogger("kvd_client.vllm")

IDLE_SECONDS = 1.0
"""Between two times that an idle engine publishes."""

POLL_SECONDS = 0.2
"""Between two looks whether something waits."""


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
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-idle-publisher", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Publish what waits, after the engine's own events; in the engine's thread.

        More than one call takes follows at once, after the requests that have come meanwhile.
        """
        if self._closed.is_set() or not self._is_due():
            return
        try:
            scheduler = self._core.scheduler
            events = [*scheduler.kv_cache_manager.take_events(), *self._take_events()]
            if events:
                scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
        except Exception:
            log.exception("an idle engine does not publish any more; it publishes in its steps")
            self.close()
            return
        if self._is_due() and not self._closed.is_set():
            self._wake()

    def close(self) -> None:
        """End the thread. May be called again."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if self._is_due():
                self._wake()

    def _wake(self) -> None:
        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def calling_engine_core() -> EngineCoreProc | None:
    """Return the engine whose constructor is running, as it is while vLLM makes a connector.

    Returns:
        None for an engine within its caller's process: it runs only when its caller says so.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, EngineCoreProc) and hasattr(caller, "input_queue"):
            return caller
        frame = frame.f_back
    return None
