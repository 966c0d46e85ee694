"""Why chunks were missed: each missed key has one reason.

The reasons are looked for in this order:

1. a ghost of the key says why its chunk left memory, or never came in; no key in memory has one;
2. the directory has the key: it is being stored, or READY by now;
3. another namespace has the key;
4. none of these: the key was never seen, as far back as ghosts go. They end with the daemon.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvd.cache.directory import DirectoryWriter
from kvd.cache.ghosts import Ghost, GhostCause, Ghosts
from kvd.metrics.counts import ChunkCounts
from kvd.metrics.misses import MissReason
from kvd_proto.directory import SlotState

_OF_CAUSE = tuple(MissReason[cause.name] for cause in GhostCause)


class Misses:
    """Counts the missed keys of one namespace by reason.

    Args:
        directory: of the namespace.
        ghosts: of the namespace.
        counts: `missed` and `missed_age` of these grow.
        elsewhere: whether another namespace has this key.
    """

    def __init__(
        self,
        directory: DirectoryWriter,
        ghosts: Ghosts,
        counts: ChunkCounts,
        elsewhere: Callable[[bytes], bool],
    ) -> None:
        self._directory = directory
        self._ghosts = ghosts
        self._counts = counts
        self._elsewhere = elsewhere

    def explain(self, keys: Sequence[bytes], now: float) -> None:
        """Count each of these missed keys under its reason; `now` in seconds of the ghosts' clock.

        To be called before the stores of the same step begin: those would all be `being_stored`.
        """
        reason_of, ages = self.reason, list[float]()
        reasons = list[MissReason]()
        for key in keys:
            reason, ghost = reason_of(key)
            reasons.append(reason)
            if ghost is not None and reason is MissReason.EVICTED:
                ages.append(now - ghost.gone)
        for reason, count in Counter(reasons).items():
            self._counts.missed[reason] += count
        if ages:
            self._counts.missed_age.observe_all(np.array(ages))

    def reason(self, key: bytes) -> tuple[MissReason, Ghost | None]:
        """Why the key is missed, with its ghost where it has one."""
        ghost = self._ghosts.find(key)
        if ghost is not None:
            return _OF_CAUSE[ghost.cause], ghost
        slot = self._directory.find(key)
        if slot >= 0:
            ready = self._directory.state(slot) == SlotState.READY
            return MissReason.READY if ready else MissReason.BEING_STORED, None
        return MissReason.OTHER_LAYOUT if self._elsewhere(key) else MissReason.NEVER_SEEN, None
