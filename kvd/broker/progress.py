"""How far something long has come, and how long it may take still."""

from collections import deque

WINDOW_SECONDS = 10.0
_APART_SECONDS = 0.1


class Progress:
    """Amounts done over time; the rate is that of the last ten seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def tell(self, now: float, done: int) -> None:
        """`done` is done by `now`. Less than before means that it began anew."""
        samples = self._samples
        if samples and done < samples[-1][1]:
            samples.clear()
        if samples and now < samples[-1][0] + _APART_SECONDS:
            return
        samples.append((now, done))
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_SECONDS:
            samples.popleft()

    def seconds_left(self, total: int) -> float | None:
        """Until `total` is done, at the measured rate; None while no rate is known."""
        if not self._samples:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        if last >= total:
            return 0.0
        if end <= begin or last <= first:
            return None
        return (total - last) * (end - begin) / (last - first)

    def __repr__(self) -> str:
        return f"<Progress {list(self._samples)[-1:]}>"
