"""Why chunks were missed: each missed key has one reason.

The reasons are looked for in this order:

1. the directory has the key: it is being stored, or READY by now;
2. a ghost of the key says why its chunk left memory, or never came in;
3. another namespace has the key;
4. none of these: the key was never seen, as far back as ghosts go. They end with the daemon.
"""

from collections.abc import Callable, Sequence

from kvd.cache.directory import DirectoryWriter
from kvd.cache.ghosts import Ghost, GhostCause, Ghosts
from kvd.metrics.counts import ChunkCounts
from kvd.metrics.misses import MissReason
from kvd_proto.directory import SlotState

_OF_CAUSE = {
    GhostCause.EVICTED: MissReason.EVICTED,
    GhostCause.REFUSED: MissReason.REFUSED,
    GhostCause.QUOTA: MissReason.QUOTA,
    GhostCause.RESET: MissReason.RESET,
    GhostCause.REMOVED: MissReason.REMOVED,
}


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
        missed, age = self._counts.missed, self._counts.missed_age
        for key in keys:
            reason, ghost = self.reason(key)
            missed[reason] += 1
            if reason is MissReason.EVICTED and ghost is not None:
                age.observe(max(0.0, now - ghost.gone))

    def reason(self, key: bytes) -> tuple[MissReason, Ghost | None]:
        """Why the key is missed, with its ghost where it has one."""
        slot = self._directory.find(key)
        if slot >= 0:
            ready = self._directory.state(slot) == SlotState.READY
            return MissReason.READY if ready else MissReason.BEING_STORED, None
        ghost = self._ghosts.find(key)
        if ghost is not None:
            return _OF_CAUSE[ghost.cause], ghost
        return MissReason.OTHER_LAYOUT if self._elsewhere(key) else MissReason.NEVER_SEEN, None

    def __repr__(self) -> str:
        counted = {reason: count for reason, count in self._counts.missed.items() if count}
        return f"<Misses {counted}>"
