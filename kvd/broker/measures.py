"""What the broker measures of itself, and lookups that engines report."""

from collections import deque

from kvd.metrics.counts import LookupCounts
from kvd_proto.messages import Lookups


class RecentMax:
    """The greatest value of the last `seconds`, to within a `parts`-th of them."""

    def __init__(self, seconds: float = 60.0, parts: int = 12) -> None:
        self._part = seconds / parts
        self._parts = parts
        self._greatest: deque[tuple[int, float]] = deque()  # number of the part, its greatest

    def observe(self, value: float, now: float) -> None:
        """Take a value in; `now` never goes back."""
        part = int(now / self._part)
        if not self._greatest or self._greatest[-1][0] != part:
            self._greatest.append((part, value))
            self._forget(part)
        elif value > self._greatest[-1][1]:
            self._greatest[-1] = (part, value)

    def get(self, now: float) -> float:
        """Return the greatest; 0 where there was none."""
        self._forget(int(now / self._part))
        return max((value for _, value in self._greatest), default=0.0)

    def _forget(self, part: int) -> None:
        while self._greatest and self._greatest[0][0] <= part - self._parts:
            self._greatest.popleft()

    def __repr__(self) -> str:
        return f"<RecentMax of {len(self._greatest)} parts>"


def new_lookups(
    known: LookupCounts, reported: Lookups, tokens_per_chunk: int | None
) -> LookupCounts:
    """Return what a session has looked up since its last report, and note that it is `known`.

    A scheduler reports totals of its session now and then; the difference is what is new, so
    nothing counts twice however often it is reported. Totals that have fallen are old news.
    Where a session counts no tokens they follow from the size of a chunk.
    """
    new = LookupCounts(
        lookup_chunks=max(0, reported.chunks - known.lookup_chunks),
        hit_chunks=max(0, reported.hit_chunks - known.hit_chunks),
        lookup_tokens=max(0, (reported.tokens or 0) - known.lookup_tokens),
        hit_tokens=max(0, (reported.hit_tokens or 0) - known.hit_tokens),
    )
    known.add(new)
    if reported.tokens is None or reported.hit_tokens is None:
        size = tokens_per_chunk or 0
        new.lookup_tokens, new.hit_tokens = new.lookup_chunks * size, new.hit_chunks * size
    return new
