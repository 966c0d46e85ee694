"""Zeroing what is to be used again: a step now and then beside jobs, one after another without.

A step takes a fraction of a millisecond, so a load never waits longer for it than for a
piece of a store.
"""

from collections import deque

from kvd.errors import LaneError
from kvd.lane.device import Device
from kvd.link import Wipe

STEP_BYTES = 2**20
PAUSE_NS = 2_000_000  # between steps while there are jobs: about a tenth of the time is left to it


class Wiping:
    """What the broker wants to be wiped, in order.

    Args:
        device: the pool's bytes are in its hands.
        pool_bytes: size of the pool.
    """

    def __init__(self, device: Device, pool_bytes: int) -> None:
        self._device = device
        self._pool_bytes = pool_bytes
        self._pieces: deque[tuple[int, deque[tuple[int, int]]]] = deque()
        self._stepped_ns = 0

    def add(self, message: Wipe) -> None:
        """Take a piece.

        Raises:
            LaneError: some of it is outside the pool; nothing of it is taken.
        """
        begins, ends = message.begins.numpy().tolist(), message.ends.numpy().tolist()
        runs = deque(zip(begins, ends, strict=True))
        bad = next((run for run in runs if not 0 <= run[0] < run[1] <= self._pool_bytes), None)
        if bad is not None:
            raise LaneError(
                f"bytes {bad[0]} to {bad[1]} are to be wiped of a pool of {self._pool_bytes}"
            )
        self._pieces.append((message.number, runs))

    def turn(self, now: int, *, jobs: bool) -> tuple[bool, int | None]:
        """Wipe a step, if it is time for one.

        Args:
            now: monotonic nanoseconds.
            jobs: there are jobs, which come first.

        Returns:
            Whether anything was wiped, and the number of the piece that was finished by it.
        """
        if not self._pieces or (jobs and now - self._stepped_ns < PAUSE_NS):
            return False, None
        self._stepped_ns = now
        number, runs = self._pieces[0]
        left = STEP_BYTES
        while runs and left:
            begin, end = runs.popleft()
            until = min(end, begin + left)
            self._device.zero(begin, until)
            left -= until - begin
            if until < end:
                runs.appendleft((until, end))
        if runs:
            return True, None
        self._pieces.popleft()
        return True, number

    def __len__(self) -> int:
        return len(self._pieces)

    def __repr__(self) -> str:
        return f"<Wiping {len(self._pieces)} pieces>"
