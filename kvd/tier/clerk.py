"""The thread that asks the backend all but puts, gets and whether it contains something.

Each of these may block, and some must not overtake each other: a chunk that a scan has found is
reported before it is reported as gone.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from kvd.errors import TierError
from kvd.logs import fault_text
from kvd.tier.contract import Capacity, Space, Tier
from kvd.tier.place import Place
from kvd.wire.tiering import Gone, Held
from kvd_proto.arrays import IntArray

log = logging.getLogger("kvd.tier")
PER_MESSAGE = 2048  # keys: the broker serves others between two messages
_Rows: TypeAlias = list[tuple[bytes, tuple[int, int, int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """A namespace has begun, or, where `space` is None, has not: why."""

    place: Place
    asked: Space
    space: Space | None
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """Keys were removed, as the broker has ordered."""

    namespace: bytes
    keys: Sequence[bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Tidied:
    """What the backend has dropped by itself was asked, and how full it is."""

    capacity: Capacity | None


Event: TypeAlias = Begun | Dropped | Tidied | Held | Gone


class Clerk:
    """One thread; what it finds it tells in the order in which it was found.

    Args:
        tier: the backend.
        tell: called by the thread for each event.
    """

    def __init__(self, tier: Tier, tell: Callable[[Event], None]) -> None:
        self._tier = tier
        self._tell = tell
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._scans: dict[Space, Iterator[_Rows]] = {}
        threading.Thread(target=self._work, name="tier-clerk", daemon=True).start()

    def begin(self, place: Place) -> None:
        """Use a namespace from now on, with the epoch that was asked last."""
        asked = place.asked
        self._tasks.put(lambda: self._begin(place, asked))

    def scan(self, space: Space) -> None:
        """Report the next piece of what is kept of a namespace; from the start at first."""
        self._tasks.put(lambda: self._scan(space))

    def forget(self, space: Space) -> None:
        """Report nothing more of a namespace."""
        self._tasks.put(lambda: self._forget(space))

    def drop(self, space: Space, keys: Sequence[bytes]) -> None:
        """Remove these."""
        self._tasks.put(lambda: self._drop(space, keys))

    def tidy(self) -> None:
        """Report what the backend has dropped by itself, and how full it is."""
        self._tasks.put(self._tidy)

    def close(self) -> None:
        """Have the thread end when its tasks are done."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("a bug in the tier's backend")

    def _begin(self, place: Place, asked: Space) -> None:
        try:
            self._tell(Begun(place, asked, self._tier.begin(asked)))
        except Exception as error:
            text = str(error)
            if not isinstance(error, TierError):
                text = fault_text(error)
                log.exception("a bug in the tier's backend: a namespace does not begin")
            self._tell(Begun(place, asked, None, text))

    def _scan(self, space: Space) -> None:
        rows: _Rows | None = None
        try:
            if space not in self._scans:
                self._scans[space] = self._tier.scan(space)
            rows = next(self._scans[space], None)
        except TierError as error:
            log.warning("a scan of %s ends early: %s", space.id.hex()[:8], error)
        finally:
            if rows is None:
                self._forget(space)
            self._report(space, rows or [], last=rows is None)

    def _report(self, space: Space, rows: _Rows, *, last: bool) -> None:
        for at in range(0, max(1, len(rows)), PER_MESSAGE):
            some = rows[at : at + PER_MESSAGE]
            first, count, groups = (
                IntArray.of([coverage[i] for _, coverage in some], "u2") for i in range(3)
            )
            self._tell(
                Held(
                    namespace=space.id,
                    epoch=space.epoch,
                    keys=tuple(key for key, _ in some),
                    first=first,
                    count=count,
                    groups=groups,
                    last=last,
                )
            )

    def _forget(self, space: Space) -> None:
        self._scans.pop(space, None)

    def _drop(self, space: Space, keys: Sequence[bytes]) -> None:
        try:
            self._tier.remove(space, keys)
        except TierError as error:
            log.warning("%d chunks that should go stay: %s", len(keys), error)
        finally:
            self._tell(Dropped(space.id, keys))

    def _tidy(self) -> None:
        capacity = None
        try:
            for namespace, keys in self._tier.take_gone():
                for at in range(0, len(keys), PER_MESSAGE):
                    some = tuple(keys[at : at + PER_MESSAGE])
                    self._tell(Gone(namespace=namespace, keys=some))
            capacity = self._tier.capacity()
        finally:
            self._tell(Tidied(capacity))

    def __repr__(self) -> str:
        return f"<Clerk, {self._tasks.qsize()} tasks wait>"
