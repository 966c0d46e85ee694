"""Every request of a worker is served once, whatever the way to here does to it.

A job that came twice would be copied twice: the second time from or into blocks that the
engine uses for something else by then, since its first answer gave them back. And a second
answer, such as that its number is in use, would be taken for the first one. So requests
are known by their numbers, and one that was here before is dropped without a word. So is one
that is late: a worker that was told that a job has ended, or is not here, uses its blocks.
"""

WINDOW = 1024  # requests that may overtake each other


class Once:
    """Numbers of requests, each new one time. They grow, but may overtake each other a little."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 1  # bit i: highest - i was here; number 0 is no request's

    def is_new(self, number: int) -> bool:
        """Whether this number is here for the first time; those far behind the highest are not."""
        ahead = number - self._highest
        if ahead > 0:
            kept = self._seen << ahead if ahead < WINDOW else 0
            self._seen = (kept | 1) & ((1 << WINDOW) - 1)
            self._highest = number
            return True
        bit = 1 << -ahead if -ahead < WINDOW else 0
        if not bit or self._seen & bit:
            return False
        self._seen |= bit
        return True

    def close_before(self, number: int) -> None:
        """From now on no number below this one, which was here, is new."""
        behind = self._highest - number
        if behind < WINDOW:
            self._seen |= ((1 << WINDOW) - 1) & ~((1 << (behind + 1)) - 1)

    def __repr__(self) -> str:
        return f"<Once up to {self._highest}>"
