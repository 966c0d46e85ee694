"""A thread that makes the driver's calls for one direction.

A call for many copies takes the driver half a microsecond and more a copy, without the
interpreter's lock; so the two directions are fed side by side, and the lane's thread does
not wait for either.
"""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvd.errors import CudaError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import Context

Item = TypeVar("Item")


class Feeder(Generic[Item]):
    """Feeds what it is given, in that order; its thread starts with the first.

    What waits for it is bounded by whoever gives.

    Args:
        name: of the thread.
        context: of the device.
        feed: for each item; does not raise what concerns this item alone.
        fail: for an item when the context cannot be made current, with the error.

    Attributes:
        broken: what `feed` raised all the same; nothing more is fed then.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        feed: Callable[[Item], None],
        fail: Callable[[Item, CudaError], None],
    ) -> None:
        self.broken: BaseException | None = None
        self._name = name
        self._context = context
        self._feed = feed
        self._fail = fail
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._given = self._fed = 0  # each is written by one thread
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all that it was given has been fed."""
        return self._given == self._fed

    def give(self, item: Item) -> None:
        """Let it be fed after all that was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._given += 1
        self._queue.put(item)

    def stop(self) -> None:
        """End the thread, which is idle."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        current = False
        try:
            while (item := self._queue.get()) is not None:
                if not current:
                    try:
                        driver.use_context(self._context)
                        current = True
                    except CudaError as error:
                        self._fail(item, error)
                if current:
                    self._feed(item)
                self._fed += 1
        except BaseException as error:  # noqa: BLE001  # the lane's thread raises it
            self.broken = error
