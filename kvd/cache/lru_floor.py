"""The floor below a policy that learns: what LRU would find in as many slots.

LRU holds the chunks that were touched last. So the times of their last touches say which of the
touched chunks LRU would have found, and no second cache is needed. `LruFloor` compares that with
what the policy has found. While it says `lru_decides`, the policy is to evict as LRU does: at
first, until enough requests were seen to learn from, and for a while whenever the policy has found
clearly less.
"""

from bisect import bisect_right

from kvd.errors import IntegrityError

PARTS = 256  # at least so many of what a full pool holds, at most twice as many


class LruContents:
    """How many chunks LRU would hold, by the time of their last touch. Times never go back."""

    def __init__(self) -> None:
        self._begins: list[float] = []  # times, oldest first; each part reaches to the next begin
        self._counts: list[int] = []  # chunks, by part
        self._total = 0

    def touch(self, last: float | None, count: int, now: float) -> int:
        """Touch `count` chunks, all touched at `last` before, or never; how many LRU would find."""
        part = -1 if last is None else bisect_right(self._begins, last) - 1
        hits = min(count, self._counts[part]) if part >= 0 else 0
        if hits:
            self._counts[part] -= hits
        if not self._begins or (now > self._begins[-1] and self._counts[-1] * PARTS > self._total):
            if len(self._begins) == 2 * PARTS:
                self._merge()
            self._begins.append(now)
            self._counts.append(0)
        self._counts[-1] += count
        self._total += count - hits
        return hits

    def shrink(self, num_chunks: int) -> None:
        """Keep the `num_chunks` that were touched last."""
        gone = 0
        while self._total > num_chunks:
            leaving = min(self._counts[gone], self._total - num_chunks)
            self._counts[gone] -= leaving
            self._total -= leaving
            gone += not self._counts[gone]
        del self._begins[:gone], self._counts[:gone]

    def _merge(self) -> None:
        """Make one part of two: most have lost chunks that were touched since."""
        self._begins = self._begins[::2]
        self._counts = [sum(self._counts[i : i + 2]) for i in range(0, len(self._counts), 2)]

    def __len__(self) -> int:
        return self._total

    def check_integrity(self) -> None:
        """Raise IntegrityError where counts contradict each other, or times go back."""
        if sum(self._counts) != self._total or min(self._counts, default=0) < 0:
            raise IntegrityError(f"{self._total} chunks in parts of {self._counts}")
        if self._begins != sorted(self._begins) or len(self._begins) != len(self._counts):
            raise IntegrityError(f"parts begin at {self._begins}")


class LruFloor:
    """Whether LRU decides.

    Args:
        first: for so many requests it does.

    Attributes:
        lru_decides: whether LRU decides now.
    """

    window = 500
    """Requests: what lies further back counts less than 1 / e."""
    allowance = 3
    """LRU decides where the policy has found less by as many chunks as so many requests touch."""
    rest, longest_rest = 250, 32_000
    """For so many requests LRU decides then: four times as many each time until what was learned
    has held for four windows."""

    def __init__(self, first: int) -> None:
        self.lru_decides = first > 0
        self._lru = LruContents()
        self._until = first  # LRU decides until this request
        self._since = 0  # the other way round since this request
        self._rest = self.rest
        self._requests = 0
        self._window_requests = 0.0
        self._touched = self._lead = 0.0  # chunks in the window; found more of them than LRU

    def touch(self, last: float | None, count: int, now: float, *, in_pool: bool) -> None:
        """A request has touched `count` chunks, all touched at `last` before, or never.

        Args:
            last: seconds.
            count: chunks.
            now: seconds.
            in_pool: whether these were in the pool.
        """
        lru_hits = self._lru.touch(last, count, now)
        self._touched += count
        self._lead += (count if in_pool else 0) - lru_hits

    def end_request(self, num_chunks: int) -> None:
        """All that a request has touched is said; the pool has `num_chunks`."""
        self._lru.shrink(num_chunks)
        self._requests += 1
        if self.lru_decides:
            if self._requests >= self._until:
                self.lru_decides, self._since = False, self._requests
                self._window_requests = self._touched = self._lead = 0.0
            return
        self._window_requests += 1
        loss = -self._lead * self._window_requests  # in requests' worth of chunks, times touched
        if loss > self.allowance * self._touched:
            self.lru_decides, self._until = True, self._requests + self._rest
            self._rest = min(4 * self._rest, self.longest_rest)
        elif self._requests - self._since > 4 * self.window and self._lead >= 0:
            self._rest = self.rest
        left = 1 - 1 / self.window
        self._window_requests *= left
        self._touched *= left
        self._lead *= left

    def check_integrity(self) -> None:
        """Raise IntegrityError where an invariant does not hold."""
        self._lru.check_integrity()
        if self._touched < 0 or abs(self._lead) > self._touched + 1e-6:
            raise IntegrityError(f"leads by {self._lead} of {self._touched} chunks")

    def __repr__(self) -> str:
        decides = "LRU decides" if self.lru_decides else "what was learned decides"
        return f"<LruFloor: {decides}, leads by {self._lead:.0f} of {self._touched:.0f} chunks>"
