"""Own stores that no change of the pool has told of yet."""

import time
from collections.abc import Callable, Collection, Iterable

PATIENCE = 1.0  # seconds; a chunk is READY within milliseconds, or was evicted before it was seen


class Unpublished:
    """Says whether an engine without requests is to step once more, to publish what it stored.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: set[bytes] = set()
        self._ended: set[bytes] = set()
        self._until = 0.0

    def begin(self, keys: Iterable[bytes]) -> None:
        """These chunks are being stored."""
        self._begun.update(keys)

    def end(self, keys: Iterable[bytes], failed: Collection[bytes] = ()) -> None:
        """All ranks have ended the stores of these chunks; those of `failed` come to nothing."""
        ended = self._begun.intersection(keys)
        self._begun -= ended
        self._ended.update(ended.difference(failed))
        self._until = self._clock() + PATIENCE

    def seen(self, keys: Iterable[bytes]) -> None:
        """These chunks are READY, and published."""
        if self._begun:
            self._begun.difference_update(keys)
        if self._ended:
            self._ended.difference_update(keys)

    def clear(self) -> None:
        """Nothing that was begun will be READY."""
        self._begun.clear()
        self._ended.clear()

    def pending(self) -> bool:
        """Whether stores have ended not long ago whose chunks were not seen."""
        if self._ended and self._clock() >= self._until:
            self._ended.clear()
        return bool(self._ended)

    def __repr__(self) -> str:
        return f"<Unpublished: {len(self._begun)} begun, {len(self._ended)} ended>"
