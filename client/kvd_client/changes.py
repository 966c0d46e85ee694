"""Which chunks of its namespace a scheduler has published, and what has changed since.

The thread that takes changes reads them from shared memory; the keeper sets the directory to read.
Nothing here waits for the daemon. Its end or restart shows as removals, or as no changes yet.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvd_client.change_reader import ChangeReader, Differences, Place
from kvd_proto.descriptions import Description, DescriptionsView
from kvd_proto.directory import DirectoryView
from kvd_proto.messages import KvEvents

ABSENT_SECONDS = 10.0
"""How long chunks stay published while the engine is detached: a daemon restarts in less."""


class Source(NamedTuple):
    """What there is to read of one attachment, after one reset or another."""

    directory: DirectoryView
    descriptions: DescriptionsView | None


class Changes:
    """One scheduler's changes. `behind`: the last `take` has left something that was there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # held by the reading thread
        self._reader = ChangeReader()
        self._source: Source | None = None
        self._followed: Source | None = None
        self._absent_since: float | None = clock()
        self._reset = False
        self._published = 0
        self.behind = False
        self._before = KvEvents(0, 0, 0, 0)  # the totals when the session began
        self._reported = self._before

    # -------------------------------------------------------- the keeper's calls

    def switch(self, source: Source | None) -> None:
        """Set the directory to read; None: there is none."""
        if source is not None:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._clock()
        self._source = source

    def reset(self) -> None:
        """All that was told is taken back by the next calls of `take`."""
        self._reset = True

    def begin_session(self) -> None:
        """Figures are those of a new session from now on."""
        self._before = self._reported = self._totals()

    def report(self) -> KvEvents | None:
        """The session's figures; None where they have been reported."""
        totals = self._totals()
        if totals == self._reported:
            return None
        self._reported, before = totals, self._before
        return KvEvents(
            totals.published - before.published,
            totals.snapshots - before.snapshots,
            totals.overruns - before.overruns,
            self._reader.take_lag() // 1000,
        )

    def _totals(self) -> KvEvents:
        return KvEvents(self._published, self._reader.snapshots, self._reader.overruns, 0)

    # ------------------------------------------------------- the engine's calls

    @property
    def waiting(self) -> bool:
        """Whether `take` would find something to do."""
        return (
            self._reset
            or self._reader.waiting
            or self._source is not self._followed
            or (self._is_given_up() and bool(self._reader))
        )

    def take(self, limit: int) -> Differences:
        """Return what has changed since the last call; see `ChangeReader.take`."""
        with self._lock:
            self._follow()
            read_before = self._reader.changes
            differences = self._reader.take(limit)
            self.behind = self._reader.unfinished or self._reader.changes - read_before >= limit
            self._published += len(differences)
            return differences

    def repeat(self) -> None:
        """What was told counts no more: all that is there is told anew."""
        with self._lock:
            self._reader.forget()

    def description(self, place: Place) -> Description | None:
        """What is known of the chunk that is or was at this place."""
        source = self._followed or self._source
        if source is None or source.descriptions is None:
            return None
        return source.descriptions.read(place.slot, place.generation)

    def _follow(self) -> None:
        """Read what there is to read now."""
        if self._reset:
            self._reset = False  # before anything is read: another reset may come
            self._leave()
            self._reader.withdraw()
        source = self._source
        if source is not self._followed:
            if source is None:
                self._leave()
            else:
                self._reader.follow(source.directory)
                self._followed = source
        if self._is_given_up():
            self._reader.withdraw()

    def _leave(self) -> None:
        self._reader.leave()
        self._followed = None

    def _is_given_up(self) -> bool:
        since = self._absent_since
        return since is not None and self._clock() >= since + ABSENT_SECONDS
