"""Steps an idle engine, so that it publishes what other engines have changed in the pool.

vLLM publishes KV events at the end of a step. An engine without requests waits in its input queue
and takes no steps. `EngineCoreRequestType.WAKEUP`, a message of vLLM's own, makes it ask again
whether there is work, and `KvdOffloadingManager.has_pending_work` then answers yes.
"""

import inspect
import logging
import threading
from collections.abc import Callable

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

log = logging.getLogger("kvd_client.vllm")

IDLE_STEP_SECONDS = 1.0
"""Between two steps that an idle engine takes to publish."""


class IdleStepper:
    """Wakes one engine from its input queue while `needs_step`, in a thread of its own.

    Args:
        core: the engine.
        needs_step: whether something waits to be published; called once a second.
    """

    def __init__(self, core: EngineCoreProc, needs_step: Callable[[], bool]) -> None:
        self._core = core
        self._needs_step = needs_step
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-idle-stepper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. May be called again."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(IDLE_STEP_SECONDS):
            try:
                if self._needs_step():
                    self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
            except Exception:
                log.exception("an idle engine is not woken any more; it publishes in its steps")
                return


def calling_engine_core() -> EngineCoreProc | None:
    """Return the engine whose constructor is running, as it is while vLLM makes a connector.

    Returns:
        None for an engine within its caller's process: it steps only when its caller says so.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, EngineCoreProc) and hasattr(caller, "input_queue"):
            return caller
        frame = frame.f_back
    return None
